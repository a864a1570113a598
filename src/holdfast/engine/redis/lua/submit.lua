-- submit: accept new jobs, or name the ones that were there first.
-- KEYS   1-3 streams  4 feed  5 delayed  6 held  7 control  8 notices  then n records, then idempotency keys
-- ARGV   1 nonce  2 feed limit  3 feed bytes  4 n  5 values a job (4 or 10)  6 packed, so many values a job:
--        line, job id, type, payload, due ('' | 'in <ms>' | 'at <ms>'; 'hold' before it: approval first),
--        index of its idempotency key (0: none), tenant, idempotency key, trace, meta
--        Four values when no job of the batch has more to say, and none is there twice.
--        7 ledger (1|0)  8 packed positions (from 1) of the durable ones ('' if none)
-- Reply  {'paused'} | {'unread'} | {'full'} (the feed) | {'ok', feed id, then index, 'known' | <id of the first job> for each that is not new}
local streams = { KEYS[1], KEYS[2], KEYS[3] }
local feed_key, delayed, held, control, notices = KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local nonce, feed_limit, feed_bytes, n, width = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- One packed argument: several a job would cost Redis more than the jobs themselves.
local jobs = cmsgpack.unpack(ARGV[6])
local plain = width == 4
local FIRST_KEY = 8

local controls = redis.call('HMGET', control, 'intake_paused', 'reader')
if controls[1] == '1' then return { 'paused' } end
-- With a ledger and without a reader the store is new, or was wiped: what the ledger knows must come first.
if ARGV[7] == '1' and not controls[2] then return { 'unread' } end
if controls[2] and (redis.call('MEMORY', 'USAGE', feed_key) or 0) > feed_bytes then
  return { 'full' }
end

check_types({ feed_key, notices, streams[1], streams[2], streams[3] }, { delayed, held }, {})
local known = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, #KEYS))
local reply, skipped, taken = { 'ok', '' }, {}, {}
local function skip(i, why)
  reply[#reply + 1], reply[#reply + 2] = i, why
  skipped[#skipped + 1] = i
  known[i] = true
end
for i = 1, n do
  if known[i] then
    skip(i, 'known')
  elseif not plain then
    local job_id, key_index = jobs[(i - 1) * width + 2], jobs[(i - 1) * width + 6]
    local first = key_index > 0 and (known[key_index] or taken[key_index])
    if taken[job_id] then
      skip(i, 'known')
    elseif first then
      skip(i, first)
    else
      taken[job_id] = true
      if key_index > 0 then taken[key_index] = job_id end
    end
  end
end
if #skipped == n then return reply end
local hurry = false
for _, i in ipairs(ARGV[8] ~= '' and cmsgpack.unpack(ARGV[8]) or {}) do hurry = hurry or not known[i] end

local at = now_ms()
local now = number(at)
local head = '1 queued 0 0 ' .. now
local to_set, p, earliest = {}, 0, nil
for i = 1, n do
  if not known[i] then
    local first = (i - 1) * width
    local line, job_id, task, payload = jobs[first + 1], jobs[first + 2], jobs[first + 3], jobs[first + 4]
    local record
    if plain then
      record = PLACE[line] .. call('XADD', streams[line + 1], '*',
        'holdfast', head, 'task_id', job_id, 'type', task, 'payload', payload) .. ' queued -'
    else
      local due, key_index, tenant, key, trace, meta = unpack(jobs, first + 5, first + 10)
      local body = { task, payload, tenant, key, trace, meta, '0', '0', now, number(line), '0' }
      if due == '' then
        record = put_in_line(streams, body, 'queued', job_id) .. ' queued -'
      else
        local how, ms = string.match(due, '(%a+) (%d+)$')
        if how then body[RUN_AT] = how == 'in' and number(at + tonumber(ms)) or ms end
        if string.sub(due, 1, 4) == 'hold' then
          record = '- waiting_approval -\n' .. cmsgpack.pack(body)
          redis.call('ZADD', held, now, job_id)
        else
          record = '- queued -\n' .. cmsgpack.pack(body)
          redis.call('ZADD', delayed, body[RUN_AT], job_id)
          if not earliest or tonumber(body[RUN_AT]) < tonumber(earliest) then earliest = body[RUN_AT] end
        end
      end
      if key_index > 0 then
        to_set[p + 1], to_set[p + 2] = KEYS[FIRST_KEY + key_index], job_id
        p = p + 2
      end
    end
    to_set[p + 1], to_set[p + 2] = KEYS[FIRST_KEY + i], record
    p = p + 2
  end
end
in_chunks(to_set, function(...) redis.call('MSET', ...) end)
reply[2] = feed_packed(feed_key, feed_limit, controls[2], nonce, plain and 'created_plain' or 'created', now, '', ARGV[6], skipped, hurry)
if earliest then tell_if_first(delayed, notices, earliest) end
return reply
