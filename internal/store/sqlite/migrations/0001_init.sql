-- +goose Up
-- Types and statements are those that PostgreSQL takes too. Instants are integer
-- milliseconds since 1970, UTC; NULL is never. JSON is text.

CREATE TABLE projects (
    id         text   PRIMARY KEY,
    name       text   NOT NULL,
    created_at bigint NOT NULL
);

CREATE TABLE sandboxes (
    id            text    PRIMARY KEY,
    project       text    NOT NULL REFERENCES projects (id),
    name          text    NOT NULL,
    state         text    NOT NULL,
    reason        text    NOT NULL,
    message       text    NOT NULL,
    conditions    text    NOT NULL,
    generation    bigint  NOT NULL,
    host          text    NOT NULL,
    host_seq      bigint  NOT NULL,
    template      text    NOT NULL,
    template_version text NOT NULL,
    spec          text    NOT NULL,
    origin_kind   text    NOT NULL,
    origin_source text    NOT NULL,
    origin_mode   text    NOT NULL,
    started       boolean NOT NULL,
    created_at    bigint  NOT NULL,
    updated_at    bigint  NOT NULL,
    state_since   bigint  NOT NULL,
    saved_at      bigint,
    deleted_at    bigint,
    version       bigint  NOT NULL
);

-- A name is free again from the moment that a deletion is accepted.
CREATE UNIQUE INDEX sandboxes_name ON sandboxes (project, name) WHERE deleted_at IS NULL;
CREATE INDEX sandboxes_list ON sandboxes (project, created_at, id);
CREATE INDEX sandboxes_template ON sandboxes (project, template) WHERE state <> 'deleted';
CREATE INDEX sandboxes_version ON sandboxes (template_version) WHERE state <> 'deleted';
CREATE INDEX sandboxes_source ON sandboxes (origin_source) WHERE origin_source <> '';

CREATE TABLE sandbox_labels (
    sandbox text NOT NULL REFERENCES sandboxes (id),
    key     text NOT NULL,
    value   text NOT NULL,
    PRIMARY KEY (sandbox, key)
);

CREATE INDEX sandbox_labels_value ON sandbox_labels (key, value, sandbox);

CREATE TABLE identities (
    sandbox text PRIMARY KEY REFERENCES sandboxes (id),
    items   text NOT NULL
);

CREATE TABLE operations (
    id         text             PRIMARY KEY,
    project    text             NOT NULL REFERENCES projects (id),
    sandbox    text             REFERENCES sandboxes (id),
    kind       text             NOT NULL,
    status     text             NOT NULL,
    step       text             NOT NULL,
    progress   double precision NOT NULL,
    generation bigint           NOT NULL,
    params     text,
    result     text,
    error      text,
    actor      text             NOT NULL,
    created_at bigint           NOT NULL,
    started_at bigint,
    ended_at   bigint,
    version    bigint           NOT NULL
);

-- At most one active operation a sandbox. Those without a sandbox have NULL there,
-- and NULLs never collide.
CREATE UNIQUE INDEX operations_active ON operations (sandbox) WHERE status IN ('pending', 'running');
CREATE INDEX operations_status ON operations (status, created_at, id);
CREATE INDEX operations_list ON operations (project, created_at, id);
CREATE INDEX operations_sandbox ON operations (sandbox, created_at, id);
CREATE INDEX operations_ended ON operations (ended_at);

CREATE TABLE events (
    seq       bigint PRIMARY KEY,
    project   text   NOT NULL,
    sandbox   text   NOT NULL,
    operation text   NOT NULL,
    type      text   NOT NULL,
    actor     text   NOT NULL,
    key       text   NOT NULL,
    data      text,
    at        bigint NOT NULL
);

CREATE INDEX events_project ON events (project, seq);
CREATE INDEX events_sandbox ON events (sandbox, seq);
CREATE INDEX events_at ON events (at);

-- The highest number given to an event. Pruning all events does not take it back.
CREATE TABLE event_numbers (
    last bigint NOT NULL
);

INSERT INTO event_numbers (last) VALUES (0);

CREATE TABLE templates (
    project    text   NOT NULL REFERENCES projects (id),
    name       text   NOT NULL,
    digest     text   NOT NULL,
    source     text   NOT NULL,
    bytes      bigint NOT NULL,
    user_name  text   NOT NULL,
    workdir    text   NOT NULL,
    env        text   NOT NULL,
    created_at bigint NOT NULL,
    PRIMARY KEY (project, name)
);

CREATE INDEX templates_digest ON templates (digest);

CREATE TABLE api_keys (
    id         text   PRIMARY KEY,
    project    text   NOT NULL REFERENCES projects (id),
    name       text   NOT NULL,
    hash       text   NOT NULL UNIQUE,
    prefix     text   NOT NULL,
    created_at bigint NOT NULL,
    last_used  bigint
);

CREATE INDEX api_keys_list ON api_keys (project, created_at, id);

CREATE TABLE requests (
    project    text   NOT NULL,
    route      text   NOT NULL,
    key        text   NOT NULL,
    body_hash  text   NOT NULL,
    outcome    text   NOT NULL,
    sandboxes  text   NOT NULL,
    operation  text   NOT NULL,
    resource   text   NOT NULL,
    created_at bigint NOT NULL,
    PRIMARY KEY (project, route, key)
);

CREATE INDEX requests_age ON requests (created_at);
