-- renew: push the deadlines of leases out, if they are still this worker's.
-- KEYS   1-3 streams
-- ARGV   1 group  2 worker  3 n  then 3 a lease: line, message id, deliveries
-- Reply  positions (from 1) of the leases that are lost
local group, worker, n = ARGV[1], ARGV[2], tonumber(ARGV[3])

local ids, places = { {}, {}, {} }, {}
for i = 1, n do
  local arg = 3 + (i - 1) * 3
  local line = ARGV[arg + 1] + 1
  ids[line][#ids[line] + 1] = ARGV[arg + 2]
  places[i] = { line, ARGV[arg + 2], tonumber(ARGV[arg + 3]) }
end
local held = {}
for line = 1, 3 do
  local of_line = ids[line]
  held[line] = #of_line > 0 and deliveries_held(KEYS[line], group, worker, #of_line, '-', '+', function() return of_line end)
end
local mine, lost = { {}, {}, {} }, {}
for i, place in ipairs(places) do
  local line, id, deliveries = place[1], place[2], place[3]
  if held[line][id] == deliveries then
    mine[line][#mine[line] + 1] = id
  else
    lost[#lost + 1] = i
  end
end
for line = 1, 3 do
  for first = 1, #mine[line], CHUNK do
    local command = { 'XCLAIM', KEYS[line], group, worker, 0 }
    for i = first, math.min(first + CHUNK - 1, #mine[line]) do command[#command + 1] = mine[line][i] end
    -- JUSTID leaves the delivery count alone: a renewal is no new attempt.
    command[#command + 1] = 'JUSTID'
    redis.call(unpack(command))
  end
end
return lost
