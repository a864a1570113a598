-- publish: events for the outbox, in this order. One that is there already is left as it is.
-- Takes  :rows, a JSON list of [tenant, id, destination, topic, key, lane, payload, headers, created_at]
INSERT INTO outbox_events (tenant_id, id, destination, topic, key, lane, payload, headers, created_at)
SELECT row.value ->> 0, row.value ->> 1, row.value ->> 2, row.value ->> 3, row.value ->> 4, row.value ->> 5,
       row.value ->> 6, row.value ->> 7, row.value ->> 8
  FROM json_each(:rows) AS row WHERE true
ON CONFLICT DO NOTHING
