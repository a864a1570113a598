-- renew: push the deadlines of leases out, if they are still this worker's.
-- KEYS   1-4 streams  5 feed  6 control  then the records of those that leave a heartbeat, then streams of further lanes
-- ARGV   1 group  2 worker  3 n  4 nonce  5 feed limit  then 4 a lease: line, message id, deliveries,
--        index of its record (0: no heartbeat), then the lanes that are declared
-- Reply  positions (from 1) of the leases that are lost
local streams = declared_lines()
local group, worker, n = ARGV[1], ARGV[2], tonumber(ARGV[3])
local FIRST_ARG, STRIDE = 5, 4

local ids, places = {}, {}
for i = 1, n do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local line = ARGV[arg + 1] + 1
  ids[line] = ids[line] or {}
  ids[line][#ids[line] + 1] = ARGV[arg + 2]
  places[i] = { line, ARGV[arg + 2], tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4]) }
end
local held, mine = {}, {}
for line, of_line in pairs(ids) do
  held[line] = deliveries_held(streams[line], group, worker, #of_line, '-', '+', function() return of_line end)
  mine[line] = {}
end
local lost, beats = {}, {}
for i, place in ipairs(places) do
  local line, id, deliveries = place[1], place[2], place[3]
  if held[line][id] == deliveries then
    mine[line][#mine[line] + 1] = id
    if place[4] > 0 then beats[#beats + 1] = place end
  else
    lost[#lost + 1] = i
  end
end

-- What a heartbeat says of its job is in the message, but for retries that waited in the pending list.
local moves = {}
for _, place in ipairs(beats) do
  local line, id, deliveries, record_index = unpack(place)
  local entry = redis.call('XRANGE', streams[line], id, id)[1]
  local _, _, _, body = header_of(redis.call('GET', KEYS[record_index]) or '')
  if entry then
    local fields, m = entry[2], #moves
    local job_id
    for f = 1, #fields, 2 do job_id = fields[f] == 'task_id' and fields[f + 1] or job_id end
    moves[m + 1], moves[m + 2], moves[m + 3] = job_id, is_ours(fields) and fields[2] or '', deliveries
    moves[m + 4] = body and body ~= '' and cmsgpack.unpack(body)[RETRIES] or ''
    moves[m + 5] = tenant_of(fields)
  end
end
if #moves > 0 then check_types({ KEYS[5] }, {}, { KEYS[6] }) end

for line, of_line in pairs(mine) do
  for first = 1, #of_line, CHUNK do
    local command = { 'XCLAIM', streams[line], group, worker, 0 }
    for i = first, math.min(first + CHUNK - 1, #of_line) do command[#command + 1] = of_line[i] end
    -- JUSTID leaves the delivery count alone: a renewal is no new attempt.
    command[#command + 1] = 'JUSTID'
    redis.call(unpack(command))
  end
end
if #moves > 0 then
  feed(KEYS[5], ARGV[5], redis.call('HGET', KEYS[6], 'reader'), ARGV[4], 'heartbeat', number(now_ms()), worker, moves)
end
return lost
