-- promote: jobs whose time has come go (back) in line. No move of the state machine: a retry is `retrying` until claimed.
-- KEYS   1-3 streams  4 delayed  5 retry  then n records
-- ARGV   1 n, then 2 a job: job id, 'delayed' | 'retry'
-- Reply  how many
local streams = { KEYS[1], KEYS[2], KEYS[3] }
local sets = { delayed = KEYS[4], retry = KEYS[5] }
local n = tonumber(ARGV[1])

check_types(streams, {}, {})
local at = now_ms()
local records = redis.call('MGET', unpack(KEYS, 6, 5 + n))
local ready, strays = {}, {}
for i = 1, n do
  local job_id, set = ARGV[2 * i], sets[ARGV[2 * i + 1]]
  local due = redis.call('ZSCORE', set, job_id)
  if due and tonumber(due) <= at then
    local place, state, token, body = header_of(records[i] or '')
    if place == '-' and (state == 'queued' or state == 'retrying') then
      ready[#ready + 1] = { i, job_id, set, state, token, cmsgpack.unpack(body) }
    else
      strays[#strays + 1] = { set, job_id }
    end
  end
end
for _, job in ipairs(ready) do
  local i, job_id, set, state, token, body = unpack(job)
  -- ZREM comes first: it is allowed on a full Redis, and then so is the rest. What waits must drain too.
  redis.call('ZREM', set, job_id)
  local place = put_in_line(streams, body, state, job_id)
  redis.call('SET', KEYS[5 + i], place .. ' ' .. state .. ' ' .. token)
end
for _, stray in ipairs(strays) do redis.call('ZREM', stray[1], stray[2]) end
return #ready
