"""The statements of the PostgreSQL store: ``{s}`` is the schema, ``%b`` a value in binary. Constants, every one of them."""
# ruff: noqa: S608 - they are put together from each other, and from nothing else

from __future__ import annotations

ADD = """
WITH u AS (
    SELECT * FROM unnest(%b::uuid[], %s::text[], %s::text[], %s::text[], %s::int[], %s::bool[], %b::float8[], %b::float8[],
        %s::bigint[], %b::bytea[], %b::bytea[], %s::bigint[], %s::text[], %s::text[], %b::bytea[])
    AS u(id, grp, party, state, attempt, open, next_s, resolved_s, body, result, data, revision, dialect, provider_id, input)),
j AS (INSERT INTO {s}.job(id, grp, party, state, attempt, open, next_s, resolved_s, body, result, data, revision, made, token)
    SELECT id, grp, party, state, attempt, open, next_s, resolved_s, body, result, data, revision, %s, 0 FROM u ORDER BY id),
i AS (INSERT INTO {s}.input SELECT id, input FROM u WHERE input IS NOT NULL)
INSERT INTO {s}.provider_id SELECT dialect, provider_id, id FROM u WHERE provider_id IS NOT NULL ON CONFLICT DO NOTHING
"""
JOB = "SELECT j.data, j.result, j.id, i.job IS NOT NULL, {input} FROM {s}.job AS j LEFT JOIN {s}.input AS i ON i.job = j.id "
GET = JOB.replace("{input}", "CASE WHEN %s THEN i.data END") + "WHERE j.id = %s"
FIND = (
    JOB.replace("{input}", "CASE WHEN %s THEN i.data END")
    + "JOIN {s}.provider_id AS p ON p.job = j.id WHERE p.dialect = %s AND p.provider_id = %s ORDER BY j.id DESC LIMIT 1"
)
COMPLETED = (
    JOB.replace("{input}", "i.data")
    + "WHERE NOT j.open AND j.grp = %s AND (j.resolved_s, j.id) > (%s, %s) ORDER BY j.resolved_s, j.id LIMIT 10000"
)
SWAP = """
WITH u AS (
    UPDATE {s}.job AS j SET party = %s, state = %s, attempt = %s, open = %s, next_s = %s, resolved_s = %s, body = %s,
        result = %b, data = %b, revision = %s, token = %s, ended = CASE WHEN j.open AND NOT %s THEN %s ELSE j.ended END
    WHERE id = %s AND state = %s AND attempt = %s AND revision = %s {input_there} RETURNING id)
"""
SWAP_INPUT = {
    "dropped": ", i AS (DELETE FROM {s}.input USING u WHERE input.job = u.id)",
    "there": "",
    "given": ", i AS (INSERT INTO {s}.input SELECT id, %b FROM u ON CONFLICT DO NOTHING)",
}
SWAP_ID = ", p AS (INSERT INTO {s}.provider_id SELECT %s, %s, id FROM u ON CONFLICT DO NOTHING)"
SWAPPED = "SELECT id FROM u"
WRITTEN = (
    "SELECT token = %s OR coalesce(ended = %s, false), state = %s AND attempt = %s AND revision = %s, ended IS NOT NULL "
    "FROM {s}.job WHERE id = %s"
)
#: Each party that has open jobs: a jump through the index for each.
PARTIES = """
WITH RECURSIVE jump(party) AS (
    (SELECT party FROM {s}.job WHERE open AND next_s IS NOT NULL ORDER BY party LIMIT 1) UNION ALL
    SELECT (SELECT party FROM {s}.job WHERE open AND next_s IS NOT NULL AND party > jump.party ORDER BY party LIMIT 1)
    FROM jump WHERE jump.party IS NOT NULL), of AS (SELECT party FROM jump WHERE party IS NOT NULL)
"""
SOME_PARTIES = "WITH of AS (SELECT DISTINCT party FROM unnest(%s::text[]) AS given(party))"
DUE = """
SELECT d.id, d.next_s, d.data, d.result FROM of CROSS JOIN LATERAL (
    SELECT id, next_s, data, result FROM {s}.job WHERE open AND party = of.party AND next_s <= %s
    ORDER BY next_s LIMIT %s {lock}) AS d ORDER BY d.next_s LIMIT %s
"""
DUE_LOOK = (
    ", d AS MATERIALIZED ("
    + DUE.replace("{lock}", "")
    + ") SELECT d.*, i.job IS NOT NULL FROM d LEFT JOIN {s}.input AS i ON i.job = d.id"
)
DUE_LEASE = (
    ", d AS MATERIALIZED ("
    + DUE.replace("{lock}", "FOR NO KEY UPDATE SKIP LOCKED")
    + ") UPDATE {s}.job SET next_s = %s FROM d LEFT JOIN {s}.input AS i ON i.job = d.id WHERE job.id = d.id "
    "RETURNING d.id, d.next_s, d.data, d.result, i.job IS NOT NULL"
)
RECEIVE = """
WITH u AS (
    SELECT nextval(pg_get_serial_sequence(%s, 'number')) AS number, u.* FROM unnest(%s::text[], %s::text[], %s::bool[],
        %s::text[], %b::uuid[], %s::text[], %b::float8[], %b::bytea[], %b::bytea[])
        WITH ORDINALITY AS u(endpoint, dedupe, verified, dialect, job, provider_id, received_s, body, data, place)
    ORDER BY place)
INSERT INTO {s}.inbox(
    number, endpoint, dedupe, verified, dialect, job, provider_id, received_s, applied, token, body, data)
SELECT number, endpoint, dedupe, verified, dialect, job, provider_id, received_s, false, %s, body, data FROM u
WHERE u.verified OR NOT EXISTS(
    SELECT 1 FROM {s}.inbox AS i WHERE i.endpoint = u.endpoint AND i.dedupe = u.dedupe AND i.verified)
ORDER BY endpoint, dedupe, verified ON CONFLICT DO NOTHING RETURNING endpoint, dedupe, verified
"""
RECEIVED = """
SELECT i.endpoint, i.dedupe, i.verified FROM unnest(%s::text[], %s::text[], %s::bool[]) AS u(endpoint, dedupe, verified)
JOIN {s}.inbox AS i USING (endpoint, dedupe, verified) WHERE i.token = %s
"""
WAITING = "SELECT i.number, i.data, i.body, i.verified FROM {s}.inbox AS i WHERE i.verified AND NOT i.applied "
# Scalar subqueries: the planner would answer EXISTS by reading all jobs once.
NO_ORPHANS = """
AND coalesce((SELECT 1 FROM {s}.job WHERE job.id = i.job), (SELECT 1 FROM {s}.provider_id AS p
    WHERE i.job IS NULL AND p.dialect = i.dialect AND p.provider_id = i.provider_id LIMIT 1)) = 1
ORDER BY i.number LIMIT %s
"""
LEASE = (
    "WITH d AS MATERIALIZED (SELECT i.number FROM {s}.inbox AS i WHERE i.verified AND NOT i.applied AND i.lease_s <= "
    "extract(epoch FROM clock_timestamp()) "
    + NO_ORPHANS
    + "FOR NO KEY UPDATE SKIP LOCKED) UPDATE {s}.inbox AS i SET lease_s = extract(epoch FROM clock_timestamp()) + %s FROM d "
    "WHERE i.number = d.number RETURNING i.number, i.data, i.body, i.verified"
)
SWEEP_JOBS = """
WITH gone AS (DELETE FROM {s}.job WHERE id IN (
        SELECT id FROM {s}.job WHERE NOT open AND resolved_s < %s LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING id, body),
    b AS (DELETE FROM {s}.body USING gone WHERE body.id = gone.body),
    i AS (DELETE FROM {s}.input USING gone WHERE input.job = gone.id),
    p AS (DELETE FROM {s}.provider_id USING gone WHERE provider_id.job = gone.id)
SELECT count(*) FROM gone
"""
SWEEP_INBOX = """
WITH gone AS (DELETE FROM {s}.inbox WHERE number IN (SELECT number FROM {s}.inbox WHERE received_s < %s LIMIT %s) RETURNING 1)
SELECT count(*) FROM gone
"""
SWEEP_BODIES = """
WITH gone AS (DELETE FROM {s}.body WHERE id IN (SELECT b.id FROM {s}.body AS b LEFT JOIN {s}.job AS j ON j.body = b.id
    WHERE b.made_s < %s AND j.id IS NULL LIMIT %s) RETURNING 1)
SELECT count(*) FROM gone
"""
