-- submit: accept new jobs; reply with the existing job for each duplicate.
-- KEYS   1-4 streams  5 feed  6 delayed  7 held  8 control  9 notices  10 wake  11 lanes  then n records, then m idempotency
--        keys, then the m records of the jobs whose ids are these keys, then streams of further lanes
-- ARGV   1 nonce  2 feed limit  3 feed bytes  4 n  5 number of values per job (4 or 10)  6 packed, the values of each job:
--        priority, job id, type, payload, due ('' | 'in <ms>' | 'at <ms>'; 'hold' before it: approval first),
--        index of its idempotency key (0: none), tenant, idempotency key, trace, meta
--        Four values if no job of the batch needs more, and no job id occurs twice.
--        7 packed indexes (from 1) of durable jobs ('' if none)
--        8 group  9 consumer that holds retries in the pending list
--        10 the token of new jobs (`-`, and `#` with the fingerprint of a schema), or packed, tokens by index of the job
--        11 'each' (jobs are judged one by one) | 'whole' (all are accepted, or none)
--        12 packed, 3 values per job with a key ('' if none): index of the job, fingerprint, whether a reused key returns the
--        first job (1) or is refused (0)  13 declared lanes
-- Reply  {'paused'} | {'detached'} | {'full'} (the feed) | {'lanes', …}
--        'whole': {'reused', id of the first job, index} | {'limited', limit, backlog, tenant ('': the queue), number that fits}
--        {'ok', feed id, then index and answer for each that is not new: 'known' | <id of the first job>
--        | {'reused', id of the first job, index} | {'limited', limit, backlog, tenant}}
local streams, last_key = declared_streams()
local feed_key, delayed, held_set, control, notices, wake = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local nonce, feed_limit, feed_bytes, n, width = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- One packed argument: several per job would cost Redis more than the jobs themselves.
local jobs = cmsgpack.unpack(ARGV[6])
local plain = width == 4
local FIRST_KEY = 11

local controls = redis.call('HMGET', control, 'intake_paused', 'reader', 'feed_read', 'intake_limit', 'limits', 'lanes', 'marker')
if controls[1] == '1' then return { 'paused' } end
local marker = controls[7] or error('NOMARKER')
-- With a ledger: without a reader the store is new or was wiped; with a reader of another epoch it was restarted, or a
-- replica was promoted. The idempotency keys of the ledger must be restored first.
if EPOCH ~= '' and controls[2] ~= EPOCH then return { 'detached' } end
if controls[2] and (redis.call('MEMORY', 'USAGE', feed_key) or 0) - read_bytes(controls[3]) > feed_bytes then
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

-- Judge the jobs in order: which are known, which have the key of another request, which exceed a limit.
local whole, differing = ARGV[11] == 'whole', {}
if plain and not controls[4] and not controls[5] then
  for i = 1, n do
    if known[i] then skip(i, 'known') end
  end
else
  -- Not in a separate function: most calls would only create it.
  local undeclared, refusal
  -- Limits apply to ready and running jobs. The backlog is counted when the first new job needs it.
  local limited = controls[4] or controls[5]
  local limits, queue_limit, queued, added, tenants = limited and decode_limits(controls[5]), read_limit(controls[4]), nil, 0, {}
  local function count_queue()
    local active = numbers_in(controls[6])
    undeclared = undeclared or undeclared_lanes(streams, active)
    if undeclared then return 0 end
    local backlog = active_jobs_in(streams, 0, ARGV[8], ARGV[9])
    for _, lane in ipairs(active) do backlog = backlog + active_jobs_in(streams, lane, ARGV[8], ARGV[9]) end
    return backlog
  end
  local function limit_of(tenant)
    -- Named tenants have their own lanes, without messages of other tenants.
    local lane = tenant == 'default' and 0 or parse_lane(redis.call('HGET', KEYS[11], tenant) or '')
    local limit = lane and limits[lane]
    if not limit or limit.intake < 0 then return { added = 0 } end
    if not streams[STREAMS_PER_LANE * lane + 1] then
      undeclared = undeclared or { 'lanes', tenant, lane }
      return { added = 0 }
    end
    return { limit = limit.intake, backlog = active_jobs_in(streams, lane, ARGV[8], ARGV[9]), added = 0 }
  end
  -- The refusal of a new job; nil if it fits. A ready job then counts for those after it.
  local function over_limit(tenant, is_ready)
    if queue_limit then
      queued = queued or count_queue()
      if queued + added >= queue_limit then return { 'limited', queue_limit, whole and queued or queued + added, '' } end
    end
    local own = tenants[tenant] or limit_of(tenant)
    tenants[tenant] = own
    if own.limit and own.backlog + own.added >= own.limit then
      return { 'limited', own.limit, whole and own.backlog or own.backlog + own.added, tenant }
    end
    if is_ready then added, own.added = added + 1, own.added + 1 end
  end

  local fingerprints, returned, by_id = {}, {}, {}
  local number_of_keys = (last_key - FIRST_KEY - n) / 2
  -- The first job under a key, and the fingerprint of its request.
  local function find_first(key_index, key, tenant)
    local value = known[key_index] or accepted[key_index]
    if value then return parse_key(value) end
    local record = known[key_index + number_of_keys]
    if by_id[key] == tenant or (record and is_known_by_id(streams, record, key, tenant)) then return key, '' end
  end
  local function judge(i)
    if plain then return over_limit('default', true) end
    local at = (i - 1) * width
    local job_id, due, key_index, tenant, key = jobs[at + 2], jobs[at + 5], jobs[at + 6], jobs[at + 7], jobs[at + 8]
    if accepted[job_id] then return 'known' end
    local first, fingerprint
    if key_index > 0 then first, fingerprint = find_first(key_index, key, tenant) end
    if first == job_id then return 'known' end
    if first then
      if not is_key_reused(fingerprint, fingerprints[i]) then return first end
      if not returned[i] then return { 'reused', first, i } end
      differing[#differing + 1] = { 'duplicate', first, tenant, '', 1 }
      return first
    end
    local refused = limited and over_limit(tenant, due == '')
    if refused then return refused end
    accepted[job_id] = true
    if key_index > 0 then
      accepted[key_index] = key_value(job_id, fingerprints[i])
    else
      by_id[job_id] = tenant
    end
  end

  if not plain then
    undeclared = undeclared_positions(streams, { unpack(known, n + number_of_keys + 1, n + 2 * number_of_keys) })
    if undeclared then return undeclared end
    local keyed = ARGV[12] ~= '' and cmsgpack.unpack(ARGV[12]) or {}
    for at = 1, #keyed, 3 do fingerprints[keyed[at]], returned[keyed[at]] = keyed[at + 1], keyed[at + 2] == 1 end
  end
  for i = 1, n do
    local answer = known[i] and 'known' or judge(i)
    if answer then
      if type(answer) == 'table' then refusal = refusal or answer end
      skip(i, answer)
    end
  end
  if undeclared then return undeclared end
  if whole and refusal then
    if refusal[1] == 'limited' then refusal[5] = n - #skipped end
    return refusal
  end
end
if #skipped == n then
  if #differing > 0 then append_feed(feed_key, feed_limit, controls[2], nonce, 'adopted', format_integer(now_ms()), '', differing) end
  return reply
end

local urgent = false
for _, i in ipairs(ARGV[7] ~= '' and cmsgpack.unpack(ARGV[7]) or {}) do urgent = urgent or not known[i] end

local assignment
if not plain then
  assignment = new_assignment(streams, KEYS[11], control, ARGV[8])
  assignment.marker = marker
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
local same_token = string.byte(ARGV[10]) == 45 and ARGV[10]
local tokens = not same_token and cmsgpack.unpack(ARGV[10])
for i = 1, n do
  if not known[i] then
    local first = (i - 1) * width
    local priority, job_id, task, payload = jobs[first + 1], jobs[first + 2], jobs[first + 3], jobs[first + 4]
    local record
    local token = same_token or tokens[i]
    if plain then
      record = POSITION_PREFIX[priority] .. call('XADD', streams[priority + 1], '*',
        marker, head, 'task_id', job_id, 'type', task, 'payload', payload) .. ' queued ' .. token
    else
      local due, key_index, tenant, key, trace, meta = unpack(jobs, first + 5, first + 10)
      local body = { task, payload, tenant, key, trace, meta, '0', '0', now, format_integer(priority), '0' }
      if due == '' then
        record = append_message(assignment, STREAMS_PER_LANE * assignment.lane_of[tenant] + priority, body, 'queued', job_id) .. ' queued ' .. token
      else
        local how, ms = string.match(due, '(%a+) (%d+)$')
        if how then body[RUN_AT] = how == 'in' and format_integer(at + tonumber(ms)) or ms end
        if string.sub(due, 1, 4) == 'hold' then
          record = '- waiting_approval ' .. token .. '\n' .. cmsgpack.pack(body)
          redis.call('ZADD', held_set, now, job_id)
        else
          record = '- queued ' .. token .. '\n' .. cmsgpack.pack(body)
          redis.call('ZADD', delayed, body[RUN_AT], job_id)
          if not earliest or tonumber(body[RUN_AT]) < tonumber(earliest) then earliest = body[RUN_AT] end
        end
      end
      if key_index > 0 then
        to_set[p + 1], to_set[p + 2] = KEYS[FIRST_KEY + key_index], accepted[key_index]
        p = p + 2
      end
    end
    to_set[p + 1], to_set[p + 2] = KEYS[FIRST_KEY + i], record
    p = p + 2
  end
end
in_chunks(to_set, function(...) redis.call('MSET', ...) end)
reply[2] = append_packed_feed(feed_key, feed_limit, controls[2], nonce, plain and 'created_plain' or 'created', now, '', ARGV[6], skipped, urgent)
-- The first job stands; that the arguments of another submission differ is recorded.
if #differing > 0 then append_feed(feed_key, feed_limit, controls[2], nonce, 'adopted', now, '', differing) end
if earliest then notify_if_earliest(delayed, notices, earliest) end
return reply
