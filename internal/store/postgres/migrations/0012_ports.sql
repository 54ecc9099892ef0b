-- +goose Up
-- Who may reach the ports of a sandbox from outside without an API key. A row without a
-- hash opens its port to everybody; one with a hash is a connection token, for one port or,
-- with port 0, for all. The hash is hexadecimal.
CREATE TABLE port_grants (
    id         text COLLATE "C" PRIMARY KEY,
    project    text COLLATE "C" NOT NULL,
    sandbox    text COLLATE "C" NOT NULL REFERENCES sandboxes (id),
    port       bigint NOT NULL,
    hash       text   NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint
);

CREATE INDEX port_grants_sandbox ON port_grants (sandbox, created_at, id);

CREATE UNIQUE INDEX port_grants_public ON port_grants (sandbox, port) WHERE hash = '';
