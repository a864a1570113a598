-- promote: make due jobs ready. Not a move of the state machine: a retry stays `retrying` until it is claimed.
-- KEYS   1-4 streams  5 delayed  6 retry  7 control  8 wake  9 lanes  then n records, then streams of further lanes
-- ARGV   1 group  2 n, then 2 per job: job id, 'delayed' | 'retry', then declared lanes
-- Reply  {'lanes', …} | {how many, then the job ids that were removed because their records cannot be read}
local streams = declared_streams()
local sets, wake = { delayed = KEYS[5], retry = KEYS[6] }, KEYS[8]
local assignment = new_assignment(streams, KEYS[9], KEYS[7], ARGV[1])
local n = tonumber(ARGV[2])
local FIRST_KEY = 9

check_types(streams, {}, {})
local at = now_ms()
local records = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, FIRST_KEY + n))
local ready, orphans, reply = {}, {}, { 0 }
for i = 1, n do
  local job_id, set = ARGV[1 + 2 * i], sets[ARGV[2 + 2 * i]]
  local due = redis.call('ZSCORE', set, job_id)
  if due and tonumber(due) <= at then
    local position, state, token, packed = parse_record(records[i] or '')
    local body = position == '-' and (state == 'queued' or state == 'retrying') and unpack_body(packed)
    if body then
      lane_for_tenant(assignment, body[TENANT])
      ready[#ready + 1] = { i, job_id, set, state, token, body }
    else
      orphans[#orphans + 1] = { set, job_id }
      if records[i] and (not MOVES[state] or body == nil) then reply[#reply + 1] = job_id end
    end
  end
end
local missing = missing_lanes(assignment)
if missing then return missing end

-- ZREM comes first: a full Redis allows it, and then the rest of the script. Waiting jobs must drain, too.
for _, job in ipairs(ready) do redis.call('ZREM', job[3], job[2]) end
for _, orphan in ipairs(orphans) do redis.call('ZREM', orphan[1], orphan[2]) end
if #ready > 0 then open_lanes(assignment, wake) end
for _, job in ipairs(ready) do
  local i, job_id, _, state, token, body = unpack(job)
  local index = STREAMS_PER_LANE * assignment.lane_of[body[TENANT]] + tonumber(body[STREAM_INDEX])
  redis.call('SET', KEYS[FIRST_KEY + i], append_message(assignment, index, body, state, job_id) .. ' ' .. state .. ' ' .. token)
end
reply[1] = #ready
return reply
