-- claim_due_retries: lease due retries that waited in the pending list. One without a free slot becomes ready instead: a
-- slot that other jobs always take first would never be free at this point.
-- KEYS   1-4 streams  5 feed  6 control  7 waiting  8 wake  9 lanes  then n records, then streams of further lanes
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 consumer that holds them  6 n  7 limit  then n job ids, then declared lanes
-- Reply  {'paused'} | {'lanes', …} | {'ok', now, job ids that were removed because their records cannot be read, then
--        stream index, delivery count, entry, record for each claimed job}
local streams = declared_streams()
local feed_key, control, waiting, wake = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local group, worker, nonce, feed_limit, retry_consumer, n = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local assignment = new_assignment(streams, KEYS[9], control, group)
local most = tonumber(ARGV[7])
local FIRST_KEY, FIRST_ARG = 9, 7

local controls = redis.call('HMGET', control, 'paused', 'reader', 'limits', 'lanes', 'marker')
if controls[1] == '1' then return { 'paused' } end

local at = now_ms()
local records = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, FIRST_KEY + n))
local missing = undeclared_positions(streams, records)
if missing then return missing end
local limits, active, spare = decode_limits(controls[3]), numbers_in(controls[4]), {}
missing = limits[WHOLE_QUEUE] and undeclared_lanes(streams, active)
if missing then return missing end
local slots = free_slots_in_queue(streams, limits, active, group, retry_consumer)
-- Whether the queue and the tenant may run one more job.
local function has_free_slot(index)
  if slots == 0 then return false end
  local lane = lane_of_stream(index)
  if spare[lane] == nil then spare[lane] = free_slots_in(streams, limits, lane, group, retry_consumer) or false end
  if spare[lane] == 0 then return false end
  if spare[lane] then spare[lane] = spare[lane] - 1 end
  if slots then slots = slots - 1 end
  return true
end

local due, orphans, requeued, unreadable = {}, {}, {}, {}
for i = 1, n do
  local job_id, score = ARGV[FIRST_ARG + i], redis.call('ZSCORE', waiting, ARGV[FIRST_ARG + i])
  if score and tonumber(score) <= at then
    local position, state, token, packed = parse_record(records[i] or '')
    local index, id = split_position(position)
    local body = unpack_body(packed)
    if state ~= 'retrying' or not index or not body then
      orphans[#orphans + 1] = job_id
      if records[i] and (not MOVES[state] or (state == 'retrying' and index and packed ~= '')) then unreadable[#unreadable + 1] = job_id end
    else
      local deleted = #redis.call('XRANGE', streams[index + 1], id, id) == 0
      if not deleted and #due < most and has_free_slot(index) then
        due[#due + 1] = { i, job_id, index, id, body }
      elseif deleted or #due < most then
        -- The record has the whole job.
        lane_for_tenant(assignment, body[TENANT])
        requeued[#requeued + 1] = { i, job_id, index, id, token, body }
      end
    end
  end
end
missing = missing_lanes(assignment)
if missing then return missing end

local reply, moves = { 'ok', format_integer(at), unreadable }, {}
for _, job in ipairs(due) do
  local i, job_id, index, id, known = unpack(job)
  local stream = streams[index + 1]
  local entry = redis.call('XCLAIM', stream, group, worker, 0, id)[1]
  redis.call('ZREM', waiting, job_id)
  local deliveries = redis.call('XPENDING', stream, group, id, id, 1, worker)[1][4]
  local r = #reply
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = index, deliveries, entry, records[i]
  local fields = entry[2]
  moves[#moves + 1] = { job_id, is_native(fields, controls[5], records[i], POSITION_PREFIX[index] .. id) and fields[2] or '', deliveries, known[RETRIES], known[TENANT] }
end
for _, job in ipairs(requeued) do
  redis.call('ZREM', waiting, job[2])
  redis.call('XACK', streams[job[3] + 1], group, job[4])
  redis.call('XDEL', streams[job[3] + 1], job[4])
end
if #requeued > 0 then open_lanes(assignment, wake) end
for _, job in ipairs(requeued) do
  local i, job_id, _, _, token, body = unpack(job)
  local index = STREAMS_PER_LANE * assignment.lane_of[body[TENANT]] + tonumber(body[STREAM_INDEX])
  redis.call('SET', KEYS[FIRST_KEY + i], append_message(assignment, index, body, 'retrying', job_id) .. ' retrying ' .. token)
end
for _, job_id in ipairs(orphans) do redis.call('ZREM', waiting, job_id) end
append_feed(feed_key, feed_limit, controls[2], nonce, 'retried', format_integer(at), worker, moves)
return reply
