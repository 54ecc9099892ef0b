-- +goose Up
-- Public keys that open sandboxes of a project over SSH. One key may be of several projects.
CREATE TABLE ssh_keys (
    id          text PRIMARY KEY,
    project     text NOT NULL REFERENCES projects (id),
    name        text NOT NULL,
    fingerprint text NOT NULL,
    public_key  text NOT NULL,
    created_at  bigint NOT NULL,
    UNIQUE (project, fingerprint)
);

CREATE INDEX ssh_keys_list ON ssh_keys (project, created_at, id);
CREATE INDEX ssh_keys_fingerprint ON ssh_keys (fingerprint, created_at, id);
