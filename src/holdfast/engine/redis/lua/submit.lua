-- submit: accept new jobs, or name the ones that were there first.
-- KEYS   1-3 streams  4 feed  5 delayed  6 held  7 control  8 notices  then n records, then idempotency keys
-- ARGV   1 nonce  2 feed limit  3 feed bytes  4 n  5 packed, 11 values a job:
--        line, due ('' | 'in <ms>' | 'at <ms>'; 'hold' before it: approval first), body ('' unless parked), index of its idempotency key (0: none),
--        job id, type, payload, tenant, idempotency key, trace, meta
-- Reply  {'refused', why} | {'ok', feed id, then index, 'known' | <id of the first job> for each that is not new}
local streams = { KEYS[1], KEYS[2], KEYS[3] }
local feed_key, delayed, held, control, notices = KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local nonce, feed_limit, feed_bytes, n = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local jobs = cmsgpack.unpack(ARGV[5]) -- one argument: eleven a job would cost Redis more than the jobs themselves
local FIRST_KEY, STRIDE = 8, 11

local controls = redis.call('HMGET', control, 'intake_paused', 'reader')
if controls[1] == '1' then return { 'refused', 'an operator has paused its intake' } end
if controls[2] and (redis.call('MEMORY', 'USAGE', feed_key) or 0) > feed_bytes then
  return { 'refused', 'its feed is full because the ledger does not read it; bring the ledger back' }
end

local known = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, #KEYS))
local reply, fresh, taken = { 'ok', '' }, {}, {}
for i = 1, n do
  local at = (i - 1) * STRIDE
  local key_index, job_id = jobs[at + 4], jobs[at + 5]
  local first = key_index > 0 and (known[key_index] or taken[key_index])
  if known[i] or taken[job_id] then
    reply[#reply + 1] = i
    reply[#reply + 1] = 'known'
  elseif first then
    reply[#reply + 1] = i
    reply[#reply + 1] = first
  else
    fresh[#fresh + 1] = i
    -- A batch may name one job twice, or one key twice.
    taken[job_id] = true
    if key_index > 0 then taken[key_index] = job_id end
  end
end
if #fresh == 0 then return reply end

local at = now_ms()
local now = number(at)
local head = '1 queued 0 0 ' .. now
local moves, pairs_to_set, earliest = {}, {}, nil
for _, i in ipairs(fresh) do
  local line, due, body, key_index, job_id, task, payload, tenant, key, trace, meta =
    unpack(jobs, (i - 1) * STRIDE + 1, i * STRIDE)
  local record, state = nil, 'queued'
  local hold = string.sub(due, 1, 4) == 'hold'
  if body ~= '' then
    local how, ms = string.match(due, '(%a+) (%d+)$')
    due = how == 'in' and number(at + tonumber(ms)) or ms or ''
    body[CREATED], body[RUN_AT] = now, due == '' and '0' or due
    body = cmsgpack.pack(body)
  end
  if body == '' then
    local id
    if tenant == 'default' and key == job_id and trace == '' and meta == '' then
      id = redis.call('XADD', streams[line + 1], '*', 'holdfast', head, 'task_id', job_id, 'type', task, 'payload', payload)
    else
      id = redis.call('XADD', streams[line + 1], '*', 'holdfast', head, 'task_id', job_id, 'type', task,
        'payload', payload, 'tenant_id', tenant, 'idempotency_key', key, 'trace_id', trace, 'meta', meta)
    end
    record = line .. ':' .. id .. ' queued -'
  elseif hold then
    state = 'waiting_approval'
    record = '- waiting_approval -\n' .. body
    redis.call('ZADD', held, now, job_id)
  else
    record = '- queued -\n' .. body
    redis.call('ZADD', delayed, due, job_id)
    if not earliest or tonumber(due) < tonumber(earliest) then earliest = due end
  end
  local p, m = #pairs_to_set, #moves
  pairs_to_set[p + 1], pairs_to_set[p + 2] = KEYS[FIRST_KEY + i], record
  if key_index > 0 then
    pairs_to_set[p + 3], pairs_to_set[p + 4] = KEYS[FIRST_KEY + key_index], job_id
  end
  moves[m + 1], moves[m + 2], moves[m + 3], moves[m + 4], moves[m + 5] = job_id, state, task, payload, tenant
  moves[m + 6], moves[m + 7], moves[m + 8], moves[m + 9] = key, trace, meta, due
end
in_chunks(pairs_to_set, function(...) redis.call('MSET', ...) end)
reply[2] = feed(feed_key, feed_limit, controls[2], nonce, 'created', now, '', moves)
if earliest then tell_if_first(delayed, notices, earliest) end
return reply
