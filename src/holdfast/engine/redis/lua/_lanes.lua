-- Shared by scripts that use lanes, after _prelude: their streams, owners and limits.

local WHOLE_QUEUE = -1 -- in `limits`: the limit of all lanes together
local SHARED_MS = 10000 -- a tenant that shares a lane searches for its own again after this time

-- The number of a lane besides lane 0; nil if the text is not one.
local function parse_lane(text)
  local lane = string.match(text, '^%d+$') and tonumber(text)
  return lane and lane >= 1 and lane <= MAX_LANE and lane or nil
end

-- Lane and end of a row of `queue:lanes`; nil if it cannot be read. The end is 0 if the tenant does not share the lane.
local function parse_owner(text)
  local lane, ends = string.match(text, '^(%d+) ?(%d*)$')
  return parse_lane(lane or ''), ends and (ends == '' and 0 or tonumber(ends))
end

-- The lanes in a list, without what is not one.
local function numbers_in(text)
  local found, known = {}, {}
  for value in string.gmatch(text or '', '%d+') do
    local lane = parse_lane(value)
    if lane and not known[lane] then found[#found + 1], known[lane] = lane, true end
  end
  return found
end

local function lane_of_stream(index)
  return math.floor(index / STREAMS_PER_LANE)
end

-- The streams, by index (from 1), of lane 0 and of the declared lanes; and the number of keys before those.
local function declared_streams()
  local streams, names = { KEYS[1], KEYS[2], KEYS[3], KEYS[4] }, ARGV[#ARGV]
  if names == '' then return streams, #KEYS end
  local lanes = numbers_in(names)
  local before = #KEYS - STREAMS_PER_LANE * #lanes
  for i, lane in ipairs(lanes) do
    for offset = 1, STREAMS_PER_LANE do streams[STREAMS_PER_LANE * lane + offset] = KEYS[before + STREAMS_PER_LANE * (i - 1) + offset] end
  end
  return streams, before
end

-- The reply if some of these lanes are not declared: {'lanes', tenant ('': any), lane, …}; nil if all are.
local function undeclared_lanes(streams, lanes)
  local reply
  for _, lane in ipairs(lanes) do
    if not streams[STREAMS_PER_LANE * lane + 1] then
      reply = reply or { 'lanes' }
      reply[#reply + 1], reply[#reply + 2] = '', lane
    end
  end
  return reply
end

-- The same for the lanes in the positions of records.
local function undeclared_positions(streams, records)
  local lanes = {}
  for _, record in pairs(records) do
    local index = record and split_position(position_of(record))
    if index and index >= STREAMS_PER_LANE then lanes[#lanes + 1] = lane_of_stream(index) end
  end
  return undeclared_lanes(streams, lanes)
end

-- Whether the record is that of a job of this tenant without a key, which its own id identifies instead.
local function is_known_by_id(streams, record, job_id, tenant)
  local position, _, _, packed = parse_record(record)
  local owner, key = 'default', ''
  if packed ~= '' then
    local body = unpack_body(packed)
    if not body then return false end
    owner, key = body[TENANT], body[KEY]
  else
    local index, id = split_position(position)
    local entry = index and streams[index + 1] and redis.call('XRANGE', streams[index + 1], id, id)[1]
    if not entry then return false end
    for i = 1, #entry[2], 2 do
      if entry[2][i] == 'tenant_id' and entry[2][i + 1] ~= '' then owner = entry[2][i + 1] end
      if entry[2][i] == 'idempotency_key' then key = entry[2][i + 1] end
    end
  end
  return owner == tenant and (key == '' or key == job_id)
end

local function is_count(value)
  return type(value) == 'number' and value >= -1 and value < 1e15
end

-- Limits by lane, from `limits` in the controls. Below zero: no limit. What cannot be read is not a limit.
local function decode_limits(packed)
  local limits, values = {}, packed and unpack_table(packed) or {}
  for i = 1, #values, 4 do
    local lane, weight, concurrency, intake = values[i], values[i + 1], values[i + 2], values[i + 3]
    if is_count(lane) and is_count(weight) and weight >= 1 and is_count(concurrency) and is_count(intake) then
      limits[lane] = { weight = weight, concurrency = concurrency, intake = intake }
    end
  end
  return limits
end

local function backlog_of(streams, lane)
  local count = 0
  for index = STREAMS_PER_LANE * lane + 1, STREAMS_PER_LANE * lane + STREAMS_PER_LANE do count = count + call('XLEN', streams[index]) end
  return count
end

-- Jobs that are ready or running, which limits apply to. Retries that wait in the pending list do not count.
local function active_jobs_in(streams, lane, group, retry_consumer)
  local count = backlog_of(streams, lane)
  for index = STREAMS_PER_LANE * lane + 1, count > 0 and STREAMS_PER_LANE * lane + STREAMS_PER_LANE or 0 do
    for _, consumer in ipairs(pending(streams[index], group)[4] or {}) do
      if consumer[1] == retry_consumer then count = count - tonumber(consumer[2]) end
    end
  end
  return count
end

-- Leases in a lane. Retries that wait in the pending list do not count.
local function leases_in(streams, lane, group, retry_consumer)
  local count = 0
  for index = STREAMS_PER_LANE * lane + 1, STREAMS_PER_LANE * lane + STREAMS_PER_LANE do
    local summary = pending(streams[index], group)
    count = count + (summary[1] or 0)
    for _, consumer in ipairs(summary[4] or {}) do
      if consumer[1] == retry_consumer then count = count - tonumber(consumer[2]) end
    end
  end
  return count
end

-- How many more jobs of a lane may run; nil: no limit.
local function free_slots_in(streams, limits, lane, group, retry_consumer)
  local limit = limits[lane]
  if not limit or limit.concurrency < 0 then return nil end
  return math.max(0, limit.concurrency - leases_in(streams, lane, group, retry_consumer))
end

-- How many more jobs of the queue may run; nil: no limit. `active`: the lanes in use besides lane 0, all declared.
local function free_slots_in_queue(streams, limits, active, group, retry_consumer)
  local limit = limits[WHOLE_QUEUE]
  if not limit then return nil end
  local leases = leases_in(streams, 0, group, retry_consumer)
  for _, lane in ipairs(active) do leases = leases + leases_in(streams, lane, group, retry_consumer) end
  return math.max(0, limit.concurrency - leases)
end

local function wake_one(wake)
  redis.call('XADD', wake, 'MAXLEN', 1, '*', 'more', 1)
end

-- Leases in these streams ended: wake a worker, because a limited tenant, or the queue, may have a free slot.
local function wake_if_limited(wake, packed, indexes)
  if not packed then return end
  local limits = decode_limits(packed)
  for index in pairs(indexes) do
    if limits[WHOLE_QUEUE] then return wake_one(wake) end
    local limit = limits[lane_of_stream(index)]
    if limit and limit.concurrency >= 0 then return wake_one(wake) end
  end
end

-- The lanes of tenants' next messages, and their marker. `lane_for_tenant` reads and decides; `open_lanes` writes once no lane
-- is missing.
local function new_assignment(streams, key, control, group)
  return { streams = streams, key = key, control = control, group = group, lane_of = { default = 0, [''] = 0 }, used = {},
    given = {}, assignments = {}, released = {}, shared = {}, missing = { 'lanes' } }
end

local function load_lanes(assignment)
  local controls = redis.call('HMGET', assignment.control, 'lanes', 'limits')
  assignment.active, assignment.is_active = numbers_in(controls[1]), {}
  for _, lane in ipairs(assignment.active) do assignment.is_active[lane] = true end
  assignment.reserved = decode_limits(controls[2])
end

local function assign_lane(assignment, tenant, lane, owner)
  if owner then assignment.released[#assignment.released + 1] = owner end
  assignment.given[lane], assignment.assignments[tenant] = tenant, format_integer(lane)
  return lane
end

-- A lane for a tenant without one: a lane without an owner, else an unused one, else a share of the shortest one.
local function find_lane(assignment, tenant)
  local owners, rows, now = {}, redis.call('HGETALL', assignment.key), now_ms()
  for i = 1, #rows, 2 do
    local lane, ends = parse_owner(rows[i + 1])
    if lane and ends == 0 then
      owners[lane] = rows[i]
    elseif (not lane or ends <= now) and rows[i] ~= tenant then
      assignment.released[#assignment.released + 1] = rows[i]
    end
  end
  for lane = 1, LANES do
    if not owners[lane] and not assignment.given[lane] then return assign_lane(assignment, tenant, lane) end
  end
  local free = {}
  for lane = 1, LANES do
    if not assignment.reserved[lane] and not assignment.given[lane] then
      if not assignment.is_active[lane] and not assignment.used[lane] then return assign_lane(assignment, tenant, lane, owners[lane]) end
      free[#free + 1] = lane
    end
  end
  if #free == 0 then return 0 end
  local unknown = undeclared_lanes(assignment.streams, free)
  if unknown then
    assignment.missing = unknown
    return nil
  end
  local shortest, fewest
  for _, lane in ipairs(free) do
    local count = backlog_of(assignment.streams, lane) + (assignment.shared[lane] or 0) + (assignment.used[lane] and 1 or 0)
    if not fewest or count < fewest then shortest, fewest = lane, count end
  end
  if fewest == 0 and leases_in(assignment.streams, shortest, assignment.group, '') == 0 then
    return assign_lane(assignment, tenant, shortest, owners[shortest])
  end
  assignment.shared[shortest] = (assignment.shared[shortest] or 0) + 1
  assignment.assignments[tenant] = format_integer(shortest) .. ' ' .. format_integer(now + SHARED_MS)
  return shortest
end

-- The marker of new messages; the caller makes one if there is none.
local function load_marker(assignment)
  assignment.marker = redis.call('HGET', assignment.control, 'marker') or error('NOMARKER')
end

-- The lane of this tenant's next message; nil if the caller must declare more lanes first.
local function lane_for_tenant(assignment, tenant)
  if not assignment.marker then load_marker(assignment) end
  local lane = assignment.lane_of[tenant]
  if lane then return lane end
  if not assignment.active then load_lanes(assignment) end
  local known = redis.call('HGET', assignment.key, tenant)
  if known then
    local own, ends = parse_owner(known)
    -- A lane that now belongs to a named tenant is no longer shared.
    if own and (ends == 0 or (ends > now_ms() and not assignment.reserved[own])) then lane = own end
  end
  lane = lane or find_lane(assignment, tenant)
  if not lane then return nil end
  assignment.lane_of[tenant] = lane
  if lane > 0 then
    assignment.used[lane] = true
    local missing = assignment.missing
    if not assignment.streams[STREAMS_PER_LANE * lane + 1] then missing[#missing + 1], missing[#missing + 2] = tenant, lane end
  end
  return lane
end

-- The reply if lanes are not declared; nil if all are.
local function missing_lanes(assignment)
  return #assignment.missing > 1 and assignment.missing or nil
end

-- HSET and XGROUP come before HDEL: a full Redis must refuse a submission.
local function open_lanes(assignment, wake)
  local new = false
  for lane in pairs(assignment.used) do
    if not assignment.is_active[lane] then
      for index = STREAMS_PER_LANE * lane + 1, STREAMS_PER_LANE * lane + DIRECT do
        redis.pcall('XGROUP', 'CREATE', assignment.streams[index], assignment.group, '0', 'MKSTREAM')
      end
      assignment.active[#assignment.active + 1], new = lane, true
    end
  end
  if new then redis.call('HSET', assignment.control, 'lanes', table.concat(assignment.active, ' ')) end
  for tenant, lane in pairs(assignment.assignments) do redis.call('HSET', assignment.key, tenant, lane) end
  for _, tenant in ipairs(assignment.released) do
    if not assignment.assignments[tenant] then redis.call('HDEL', assignment.key, tenant) end
  end
  if next(assignment.used) then wake_one(wake) end
end
