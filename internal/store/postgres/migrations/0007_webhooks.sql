-- +goose Up
-- The addresses that events are sent to, and what became of each event on its way.
CREATE TABLE webhooks (
    id              text COLLATE "C" PRIMARY KEY,
    project         text COLLATE "C" NOT NULL REFERENCES projects (id),
    url             text   NOT NULL,
    description     text   NOT NULL,
    types           text   NOT NULL,
    secrets         text   NOT NULL,
    after_seq       bigint NOT NULL,
    failing_since   bigint,
    failing_error   text   NOT NULL,
    disabled_at     bigint,
    disabled_reason text   NOT NULL,
    created_at      bigint NOT NULL,
    version         bigint NOT NULL
);

CREATE INDEX webhooks_list ON webhooks (project, created_at, id);

-- The last event that deliveries were made for. What happened before this is nobody's.
CREATE TABLE webhook_cursor (
    seq bigint NOT NULL
);

INSERT INTO webhook_cursor (seq) SELECT last FROM event_numbers;

-- head is the first pending one of its webhook and lane, the only one that may be sent;
-- claim_at is when: at its time, and not before a lease on it has run out.
CREATE TABLE webhook_deliveries (
    id           text COLLATE "C" PRIMARY KEY,
    webhook      text COLLATE "C" NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
    project      text COLLATE "C" NOT NULL,
    sandbox      text COLLATE "C" NOT NULL,
    seq          bigint  NOT NULL,
    type         text    NOT NULL,
    lane         text COLLATE "C" NOT NULL,
    status       text    NOT NULL,
    error        text    NOT NULL,
    attempts     bigint  NOT NULL,
    tries        bigint  NOT NULL,
    since        bigint  NOT NULL,
    next_at      bigint  NOT NULL,
    ended_at     bigint,
    created_at   bigint  NOT NULL,
    head         boolean NOT NULL,
    claim_at     bigint  NOT NULL,
    lease        text    NOT NULL,
    leased_until bigint  NOT NULL
);

CREATE INDEX webhook_deliveries_list ON webhook_deliveries (webhook, seq, id);
CREATE INDEX webhook_deliveries_lane ON webhook_deliveries (webhook, lane, seq) WHERE status = 'pending';
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (claim_at) WHERE head;
CREATE INDEX webhook_deliveries_claim ON webhook_deliveries (webhook, claim_at) WHERE head;
CREATE INDEX webhook_deliveries_ended ON webhook_deliveries (ended_at);

CREATE TABLE webhook_attempts (
    delivery text COLLATE "C" NOT NULL REFERENCES webhook_deliveries (id) ON DELETE CASCADE,
    n        bigint NOT NULL,
    at       bigint NOT NULL,
    took     bigint NOT NULL,
    status   bigint NOT NULL,
    error    text   NOT NULL,
    PRIMARY KEY (delivery, n)
);
