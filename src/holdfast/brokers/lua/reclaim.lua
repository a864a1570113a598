-- take: entries of dead consumers, and own ones whose delivery was lost on the way, are delivered once more.
-- KEYS  1 stream
-- ARGV  1 group  2 consumer  3 visibility ms  4.. entry id, its owner, its deliveries so far
-- Reply the entries that are the caller's now, each { id, { field, value … }, deliveries }
local stream, group, me, visibility = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local taken, owners = {}, {}
for at = 4, #ARGV, 3 do
  local id, owner, deliveries = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local row = pending_row(stream, group, id)
  -- As it was seen: else somebody else was faster, or its owner lives.
  if row and row[2] == owner and row[4] == deliveries and (owner == me or row[3] >= visibility) then
    if #redis.call('XRANGE', stream, id, id) == 0 then
      redis.call('XACK', stream, group, id)
    else
      local entry = redis.call('XCLAIM', stream, group, me, 0, id)[1]
      taken[#taken + 1] = { entry[1], entry[2], deliveries + 1 }
    end
    owners[owner] = owner ~= me
  end
end
for owner, gone in pairs(owners) do
  -- With entries of its own it must stay: they would be lost with it.
  if gone and #redis.call('XPENDING', stream, group, '-', '+', 1, owner) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, owner)
  end
end
return taken
