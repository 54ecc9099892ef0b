-- +goose Up
-- The policy of a sandbox from before this is empty: it has no auto-stop.
ALTER TABLE sandboxes ADD COLUMN policy text NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN policy_change bigint NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN policy_restart boolean NOT NULL DEFAULT false;
ALTER TABLE sandboxes ADD COLUMN deadline_at bigint;

CREATE INDEX sandboxes_policy ON sandboxes (policy_change) WHERE policy_change <> 0;
