-- renew: extend leases that are still this worker's. A lease that had expired long before, and that no other process reclaimed,
-- proves an outage: its worker lives, and reclaimers could not reach this server. The time of the last one is kept.
-- KEYS   1-4 streams  5 feed  6 control  then the records of jobs with a heartbeat, then streams of further lanes
-- ARGV   1 group  2 worker  3 n  4 nonce  5 feed limit  6 idle time that proves an outage  then 4 per lease: stream index,
--        message id, delivery count, index of its record (0: no heartbeat), then declared lanes
-- Reply  indexes (from 1) of lost leases
local streams = declared_streams()
local group, worker, n, outage_idle = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[6])
local FIRST_ARG, STRIDE = 6, 4

local ids, positions = {}, {}
for i = 1, n do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local index = ARGV[arg + 1] + 1
  ids[index] = ids[index] or {}
  ids[index][#ids[index] + 1] = ARGV[arg + 2]
  positions[i] = { index, ARGV[arg + 2], tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4]) }
end
local leased, idle, mine, outage = {}, {}, {}, false
for index, of_index in pairs(ids) do
  idle[index] = {}
  leased[index] = deliveries_held(streams[index], group, worker, #of_index, '-', '+', function() return of_index end, idle[index])
  mine[index] = {}
end
local lost, beats = {}, {}
for i, position in ipairs(positions) do
  local index, id, deliveries = position[1], position[2], position[3]
  if leased[index][id] == deliveries then
    mine[index][#mine[index] + 1] = id
    outage = outage or idle[index][id] >= outage_idle
    if position[4] > 0 then beats[#beats + 1] = position end
  else
    lost[#lost + 1] = i
  end
end

-- The data of a heartbeat is in the message, except for retries that waited in the pending list.
local moves = {}
local controls = #beats > 0 and redis.call('HMGET', KEYS[6], 'reader', 'marker', 'cleared')
-- The ledger may know more of these jobs.
if controls and EPOCH ~= '' and controls[3] ~= EPOCH then beats = {} end
for _, position in ipairs(beats) do
  local index, id, deliveries, record_index = unpack(position)
  local entry = redis.call('XRANGE', streams[index], id, id)[1]
  local record = redis.call('GET', KEYS[record_index]) or ''
  if entry then
    local fields, m = entry[2], #moves
    local job_id
    for f = 1, #fields, 2 do job_id = fields[f] == 'task_id' and fields[f + 1] or job_id end
    moves[m + 1], moves[m + 2], moves[m + 3] = job_id, is_native(fields, controls[2], record, POSITION_PREFIX[index - 1] .. id) and fields[2] or '', deliveries
    moves[m + 4] = known_retries(record) or ''
    moves[m + 5] = tenant_of(fields)
  end
end
if #moves > 0 or outage then check_types({ KEYS[5] }, {}, { KEYS[6] }) end

for index, of_index in pairs(mine) do
  for first = 1, #of_index, CHUNK do
    local command = { 'XCLAIM', streams[index], group, worker, 0 }
    for i = first, math.min(first + CHUNK - 1, #of_index) do command[#command + 1] = of_index[i] end
    -- JUSTID leaves the delivery count alone: a renewal is not a new attempt.
    command[#command + 1] = 'JUSTID'
    redis.call(unpack(command))
  end
end
if outage then redis.call('HSET', KEYS[6], 'outage', format_integer(now_ms())) end
if #moves > 0 then
  append_feed(KEYS[5], ARGV[5], controls[1], ARGV[4], 'heartbeat', format_integer(now_ms()), worker, moves)
end
return lost
