-- uses: lanes
-- submit: accept new jobs; reply with the existing job for each duplicate.
-- KEYS   1-4 streams  5 feed  6 delayed  7 held  8 control  9 notices  10 wake  11 lanes  then n records, then idempotency
--        keys, then streams of further lanes
-- ARGV   1 nonce  2 feed limit  3 feed bytes  4 n  5 number of values per job (4 or 10)  6 packed, the values of each job:
--        priority, job id, type, payload, due ('' | 'in <ms>' | 'at <ms>'; 'hold' before it: approval first),
--        index of its idempotency key (0: none), tenant, idempotency key, trace, meta
--        Four values if no job of the batch needs more, and no job id occurs twice.
--        7 epoch that the caller expects ('': there is no ledger)  8 packed indexes (from 1) of durable jobs ('' if none)
--        9 group  10 consumer that holds retries in the pending list  11 declared lanes
-- Reply  {'paused'} | {'detached'} | {'full'} (the feed) | {'lanes', …} | {'limited', limit, backlog, tenant ('': the queue)} |
--        {'ok', feed id, then index, 'known' | <id of the first job> for each that is not new}
local streams, last_key = declared_streams()
local feed_key, delayed, held_set, control, notices, wake = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local nonce, feed_limit, feed_bytes, n, width = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- One packed argument: several per job would cost Redis more than the jobs themselves.
local jobs = cmsgpack.unpack(ARGV[6])
local plain = width == 4
local FIRST_KEY = 11

local controls = redis.call('HMGET', control, 'intake_paused', 'reader', 'feed_read', 'intake_limit', 'limits', 'lanes')
if controls[1] == '1' then return { 'paused' } end
-- With a ledger: without a reader the store is new or was wiped; with a reader of another epoch it was restarted, or a
-- replica was promoted. The idempotency keys of the ledger must be restored first.
if ARGV[7] ~= '' and controls[2] ~= ARGV[7] then return { 'detached' } end
if controls[2] and (redis.call('MEMORY', 'USAGE', feed_key) or 0) - (controls[3] or 0) > feed_bytes then
  return { 'full' }
end

check_types({ feed_key, notices, wake }, { delayed, held_set }, { KEYS[11] })
check_types(streams, {}, {})
local known = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, last_key))
local reply, skipped, accepted = { 'ok', '' }, {}, {}
local function skip(i, answer)
  reply[#reply + 1], reply[#reply + 2] = i, answer
  skipped[#skipped + 1] = i
  known[i] = true
end
for i = 1, n do
  if known[i] then
    skip(i, 'known')
  elseif not plain then
    local job_id, key_index = jobs[(i - 1) * width + 2], jobs[(i - 1) * width + 6]
    local first = key_index > 0 and (known[key_index] or accepted[key_index])
    if accepted[job_id] then
      skip(i, 'known')
    elseif first then
      skip(i, first)
    else
      accepted[job_id] = true
      if key_index > 0 then accepted[key_index] = job_id end
    end
  end
end
if #skipped == n then return reply end

-- Limits apply to ready and running jobs. Duplicates have been answered above, without limits.
local function over_limit(limits)
  local queue_limit = tonumber(controls[4])
  if queue_limit then
    local active = numbers_in(controls[6])
    local missing = undeclared_lanes(streams, active)
    if missing then return missing end
    local backlog = active_jobs_in(streams, 0, ARGV[9], ARGV[10])
    for _, lane in ipairs(active) do backlog = backlog + active_jobs_in(streams, lane, ARGV[9], ARGV[10]) end
    if backlog + n - #skipped > queue_limit then return { 'limited', queue_limit, backlog, '' } end
  end
  local more = {}
  for i = 1, n do
    local tenant = plain and 'default' or jobs[(i - 1) * width + 7]
    if not known[i] then more[tenant] = (more[tenant] or 0) + 1 end
  end
  for tenant, count in pairs(more) do
    -- Named tenants have their own lanes, without messages of other tenants.
    local lane = tenant == 'default' and 0 or tonumber(redis.call('HGET', KEYS[11], tenant) or nil)
    local limit = lane and limits[lane]
    if limit and limit.intake >= 0 then
      if not streams[STREAMS_PER_LANE * lane + 1] then return { 'lanes', tenant, lane } end
      local backlog = active_jobs_in(streams, lane, ARGV[9], ARGV[10])
      if backlog + count > limit.intake then return { 'limited', limit.intake, backlog, tenant } end
    end
  end
end
if controls[4] or controls[5] then
  local refusal = over_limit(decode_limits(controls[5]))
  if refusal then return refusal end
end

local urgent = false
for _, i in ipairs(ARGV[8] ~= '' and cmsgpack.unpack(ARGV[8]) or {}) do urgent = urgent or not known[i] end

local assignment
if not plain then
  assignment = new_assignment(streams, KEYS[11], control, ARGV[9])
  for i = 1, n do
    local first = (i - 1) * width
    if not known[i] and jobs[first + 5] == '' then lane_for_tenant(assignment, jobs[first + 7]) end
  end
  local missing = missing_lanes(assignment)
  if missing then return missing end
  open_lanes(assignment, wake)
end

local at = now_ms()
local now = format_integer(at)
local head = '1 queued 0 0 ' .. now
local to_set, p, earliest = {}, 0, nil
for i = 1, n do
  if not known[i] then
    local first = (i - 1) * width
    local priority, job_id, task, payload = jobs[first + 1], jobs[first + 2], jobs[first + 3], jobs[first + 4]
    local record
    if plain then
      record = POSITION_PREFIX[priority] .. call('XADD', streams[priority + 1], '*',
        'holdfast', head, 'task_id', job_id, 'type', task, 'payload', payload) .. ' queued -'
    else
      local due, key_index, tenant, key, trace, meta = unpack(jobs, first + 5, first + 10)
      local body = { task, payload, tenant, key, trace, meta, '0', '0', now, format_integer(priority), '0' }
      if due == '' then
        record = append_message(streams, STREAMS_PER_LANE * assignment.lane_of[tenant] + priority, body, 'queued', job_id) .. ' queued -'
      else
        local how, ms = string.match(due, '(%a+) (%d+)$')
        if how then body[RUN_AT] = how == 'in' and format_integer(at + tonumber(ms)) or ms end
        if string.sub(due, 1, 4) == 'hold' then
          record = '- waiting_approval -\n' .. cmsgpack.pack(body)
          redis.call('ZADD', held_set, now, job_id)
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
reply[2] = append_packed_feed(feed_key, feed_limit, controls[2], nonce, plain and 'created_plain' or 'created', now, '', ARGV[6], skipped, urgent)
if earliest then notify_if_earliest(delayed, notices, earliest) end
return reply
