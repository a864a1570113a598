-- Shared functions: the owner of a pending entry.

-- The entry's row in the group's pending list: { id, owner, idle ms, deliveries }, or nil.
local function pending_row(stream, group, id)
  return redis.call('XPENDING', stream, group, id, id, 1)[1]
end

-- Whether the entry is pending for this consumer, with this delivery count.
local function holds(stream, group, consumer, id, deliveries)
  local row = pending_row(stream, group, id)
  return row ~= nil and row[2] == consumer and row[4] == tonumber(deliveries)
end
