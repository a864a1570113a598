-- reclaim: claim expired entries of other consumers, and own entries whose delivery was lost.
-- KEYS  1 stream
-- ARGV  1 group  2 consumer  3 visibility ms  4.. entry id, owner, delivery count
-- Reply the claimed entries, each { id, { field, value … }, delivery count }
local stream, group, me, visibility = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local claimed, owners = {}, {}
for at = 4, #ARGV, 3 do
  local id, owner, deliveries = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local row = pending_row(stream, group, id)
  -- Unchanged since it was read: otherwise another consumer was faster, or the owner renewed it.
  if row and row[2] == owner and row[4] == deliveries and (owner == me or row[3] >= visibility) then
    if #redis.call('XRANGE', stream, id, id) == 0 then
      redis.call('XACK', stream, group, id)
    else
      local entry = redis.call('XCLAIM', stream, group, me, 0, id)[1]
      claimed[#claimed + 1] = { entry[1], entry[2], deliveries + 1 }
    end
    owners[owner] = owner ~= me
  end
end
for owner, gone in pairs(owners) do
  -- A consumer that has pending entries must stay: deleting it would lose them.
  if gone and #redis.call('XPENDING', stream, group, '-', '+', 1, owner) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, owner)
  end
end
return claimed
