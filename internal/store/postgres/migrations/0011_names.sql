-- +goose Up
-- Names that were given up and can be asked for still: of sandboxes that are being
-- deleted, or could be undeleted. Those that are held have an index of their own.
CREATE INDEX sandboxes_given_up ON sandboxes (project, name) WHERE deleted_at IS NOT NULL AND state <> 'deleted';
