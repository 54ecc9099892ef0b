-- +goose Up
-- The timers of a sandbox that is stopped or archived: what they count from, when each falls due, whether the archiving
-- that fell due waits for cold storage, and the first of them that is to be acted on. NULL is one that does not run.
ALTER TABLE sandboxes ADD COLUMN timers_from bigint;
ALTER TABLE sandboxes ADD COLUMN archive_at bigint;
ALTER TABLE sandboxes ADD COLUMN delete_at bigint;
ALTER TABLE sandboxes ADD COLUMN archive_waits boolean NOT NULL DEFAULT false;
ALTER TABLE sandboxes ADD COLUMN due_at bigint;

-- Before this nobody could choose: 14 days after the stop, and no deletion.
UPDATE sandboxes SET timers_from = state_since, archive_at = state_since + 1209600000, due_at = state_since + 1209600000
WHERE state = 'stopped' AND deleted_at IS NULL;

CREATE INDEX sandboxes_due ON sandboxes (host, due_at) WHERE due_at IS NOT NULL;

-- The harness turns that are active: while one is, the auto-stop of its sandbox is put off.
CREATE TABLE leases (
    sandbox text   NOT NULL REFERENCES sandboxes (id),
    turn    text   NOT NULL,
    since   bigint NOT NULL,
    PRIMARY KEY (sandbox, turn)
);

-- What the last sleep of a sandbox missed of the timers inside, as JSON.
CREATE TABLE missed_timers (
    sandbox text PRIMARY KEY REFERENCES sandboxes (id),
    missed  text NOT NULL
);
