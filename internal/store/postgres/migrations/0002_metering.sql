-- +goose Up
-- What sandboxes use: the ledger, the facts that it is recomputed from, and the prices.
-- Nothing is ever changed in them or taken out.

-- A stable id of each event. Those from before have their number for one.
ALTER TABLE events ADD COLUMN uid text NOT NULL DEFAULT '';
UPDATE events SET uid = 'ev_' || seq;
ALTER TABLE event_inbox ADD COLUMN uid text NOT NULL DEFAULT '';
UPDATE event_inbox SET uid = 'ev_inbox_' || id;

-- What of a sandbox's metering is not in the ledger yet, as JSON.
CREATE TABLE meters (
    sandbox text COLLATE "C" PRIMARY KEY REFERENCES sandboxes (id),
    project text COLLATE "C" NOT NULL,
    meter   text NOT NULL
);

CREATE INDEX meters_project ON meters (project, sandbox);

CREATE TABLE meter_facts (
    sandbox text COLLATE "C" NOT NULL,
    n       bigint NOT NULL,
    fact    text   NOT NULL,
    PRIMARY KEY (sandbox, n)
);

CREATE TABLE meter_entries (
    sandbox      text COLLATE "C" NOT NULL,
    n            bigint NOT NULL,
    project      text COLLATE "C" NOT NULL,
    kind         text   NOT NULL,
    reason       text   NOT NULL,
    end_reason   text   NOT NULL,
    began_at     bigint NOT NULL,
    ended_at     bigint NOT NULL,
    vcpus        bigint NOT NULL,
    memory_bytes bigint NOT NULL,
    disk_bytes   bigint NOT NULL,
    price        bigint NOT NULL,
    generation   bigint NOT NULL,
    event        text   NOT NULL,
    PRIMARY KEY (sandbox, n)
);

CREATE INDEX meter_entries_project ON meter_entries (project, ended_at);

-- Prices are decimals in units of the operator's currency.
CREATE TABLE prices (
    version          bigint PRIMARY KEY,
    valid_from       bigint NOT NULL,
    vcpu_second      text   NOT NULL,
    gib_second       text   NOT NULL,
    archive_gb_month text   NOT NULL
);

-- Until the operator names prices, compute is metered and costs nothing.
INSERT INTO prices (version, valid_from, vcpu_second, gib_second, archive_gb_month) VALUES (1, 0, '0', '0', '0.012');

-- +goose StatementBegin
CREATE FUNCTION meter_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only';
END $$;
-- +goose StatementEnd

CREATE TRIGGER meter_entries_kept BEFORE UPDATE OR DELETE ON meter_entries FOR EACH ROW EXECUTE FUNCTION meter_append_only();
CREATE TRIGGER meter_facts_kept BEFORE UPDATE OR DELETE ON meter_facts FOR EACH ROW EXECUTE FUNCTION meter_append_only();
