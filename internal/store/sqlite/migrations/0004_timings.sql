-- +goose Up
-- How long the steps of an operation took, as JSON; NULL is not known.
ALTER TABLE operations ADD COLUMN timings text;
