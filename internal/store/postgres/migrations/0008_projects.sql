-- +goose Up
-- What a project may use and spend. Quotas, the rate and the default auto-stop are JSON.
-- Whatever was before belongs to projects without a limit.
ALTER TABLE projects ADD COLUMN plan text NOT NULL DEFAULT 'standard';
ALTER TABLE projects ADD COLUMN settings text NOT NULL DEFAULT '{}';
-- The budget is a decimal; '' is none. It counts what is metered from budget_from on, and
-- budget_spent is what of that is in the ledger, in parts that are exact.
ALTER TABLE projects ADD COLUMN budget text NOT NULL DEFAULT '';
ALTER TABLE projects ADD COLUMN budget_from bigint;
ALTER TABLE projects ADD COLUMN budget_set_at bigint;
ALTER TABLE projects ADD COLUMN budget_spent text NOT NULL DEFAULT '0';
ALTER TABLE projects ADD COLUMN exhausted_at bigint;
ALTER TABLE projects ADD COLUMN version bigint NOT NULL DEFAULT 1;

CREATE INDEX projects_budget ON projects (id) WHERE budget <> '';

-- Keys from before this were made by the operator and open everything.
ALTER TABLE api_keys ADD COLUMN scopes text NOT NULL DEFAULT '';
ALTER TABLE api_keys ADD COLUMN expires_at bigint;
ALTER TABLE api_keys ADD COLUMN rotated_at bigint;
UPDATE api_keys SET scopes = 'operator';

-- What quotas add up.
ALTER TABLE sandboxes ADD COLUMN cpus bigint NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN memory_bytes bigint NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN disk_bytes bigint NOT NULL DEFAULT 0;
UPDATE sandboxes SET
    cpus         = COALESCE((spec::json ->> 'cpus')::bigint, 0),
    memory_bytes = COALESCE((spec::json ->> 'memory_bytes')::bigint, 0),
    disk_bytes   = COALESCE((spec::json ->> 'disk_bytes')::bigint, 0);

CREATE INDEX sandboxes_use ON sandboxes (project, state) WHERE state <> 'deleted';

-- Whether something is metered, or may yet be. Those from before may.
ALTER TABLE meters ADD COLUMN running boolean NOT NULL DEFAULT true;

CREATE INDEX meters_running ON meters (project, sandbox) WHERE running;
