-- +goose Up
-- What the user decides about a failed save, for the host to take note of.
ALTER TABLE sandboxes ADD COLUMN policy_keep boolean NOT NULL DEFAULT false;

-- Until when a deleted sandbox can be brought back; NULL where nothing of it is kept.
ALTER TABLE sandboxes ADD COLUMN erase_at bigint;

CREATE INDEX sandboxes_erase ON sandboxes (project, name) WHERE erase_at IS NOT NULL;

-- When its end was asked for; NULL is never.
ALTER TABLE operations ADD COLUMN cancel_at bigint;

CREATE INDEX operations_cancel ON operations (cancel_at) WHERE cancel_at IS NOT NULL AND status IN ('pending', 'running');

-- The keys that receipts are signed with; the newest one signs. The secret is base64.
CREATE TABLE signing_keys (
    id         text COLLATE "C" PRIMARY KEY,
    secret     text NOT NULL,
    created_at bigint NOT NULL
);

-- One for each save that was committed: the document as it was signed.
CREATE TABLE receipts (
    operation text COLLATE "C" PRIMARY KEY,
    project   text COLLATE "C" NOT NULL,
    sandbox   text COLLATE "C" NOT NULL REFERENCES sandboxes (id),
    document  text NOT NULL,
    at        bigint NOT NULL
);

CREATE INDEX receipts_sandbox ON receipts (sandbox, at);
CREATE INDEX receipts_at ON receipts (at);
