-- find_due: waiting jobs that are due, and when the next one is. Reads only.
-- KEYS   sets by due time
-- ARGV   1 limit
-- Reply  {now, next due ('' if none), then the due job ids of each set}
local limit = tonumber(ARGV[1])
local at = now_ms()
local reply, next_due = { format_integer(at), '' }, nil
for i, set in ipairs(KEYS) do
  reply[2 + i] = redis.call('ZRANGEBYSCORE', set, '-inf', format_integer(at), 'LIMIT', 0, limit)
  local later = redis.call('ZRANGEBYSCORE', set, '(' .. format_integer(at), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local due = #reply[2 + i] == limit and at or tonumber(later[2])
  -- Another program can write a due time that is not an instant.
  if due and due < 1e15 and (not next_due or due < next_due) then next_due = due end
end
if next_due then reply[2] = format_integer(next_due) end
return reply
