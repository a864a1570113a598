-- retake: retries that waited in the pending list and are due run again under this worker.
-- KEYS   1-3 streams  4 feed  5 control  6 waiting  then n records
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 n  then n job ids
-- Reply  {'paused'} | {'ok', now, then line, deliveries, entry, record for each taken}
local feed_key, control, waiting = KEYS[4], KEYS[5], KEYS[6]
local group, worker, nonce, feed_limit, n = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

local controls = redis.call('HMGET', control, 'paused', 'reader')
if controls[1] == '1' then return { 'paused' } end

local at = now_ms()
local records = redis.call('MGET', unpack(KEYS, 7, 6 + n))
local due, strays, again = {}, {}, {}
for i = 1, n do
  local job_id, score = ARGV[5 + i], redis.call('ZSCORE', waiting, ARGV[5 + i])
  if score and tonumber(score) <= at then
    local place, state, token, body = header_of(records[i] or '')
    local line, id = split_place(place or '')
    if state == 'retrying' and line and #redis.call('XRANGE', KEYS[line + 1], id, id) == 1 then
      due[#due + 1] = { i, job_id, line, id }
    elseif state == 'retrying' and line and body ~= '' then
      -- Somebody deleted the message; the record has all of the job.
      again[#again + 1] = { i, job_id, line, id, token, cmsgpack.unpack(body) }
    else
      strays[#strays + 1] = job_id
    end
  end
end
local reply, moves = { 'ok', number(at) }, {}
for _, job in ipairs(due) do
  local i, job_id, line, id = unpack(job)
  local entry = redis.call('XCLAIM', KEYS[line + 1], group, worker, 0, id)[1]
  redis.call('ZREM', waiting, job_id)
  local deliveries = redis.call('XPENDING', KEYS[line + 1], group, id, id, 1, worker)[1][4]
  local r = #reply
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = line, deliveries, entry, records[i]
  local fields, _, _, _, body = entry[2], header_of(records[i])
  local known = cmsgpack.unpack(body)
  moves[#moves + 1] = { job_id, is_ours(fields) and fields[2] or '', deliveries, known[RETRIES], known[TENANT] }
end
for _, job in ipairs(again) do
  local i, job_id, line, id, token, body = unpack(job)
  redis.call('ZREM', waiting, job_id)
  redis.call('XACK', KEYS[line + 1], group, id)
  redis.call('SET', KEYS[6 + i], put_in_line(KEYS, body, 'retrying', job_id) .. ' retrying ' .. token)
end
for _, job_id in ipairs(strays) do redis.call('ZREM', waiting, job_id) end
feed(feed_key, feed_limit, controls[2], nonce, 'retaken', number(at), worker, moves)
return reply
