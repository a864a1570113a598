-- Put before every script, after the common part: lanes, whose they are, and what operators allow them.

local SHARED_MS = 10000 -- a tenant that found no lane of its own looks again after so long

local function numbers_in(text)
  local found = {}
  for value in string.gmatch(text or '', '%d+') do found[#found + 1] = tonumber(value) end
  return found
end

local function lane_of_line(line)
  return math.floor(line / WIDTH)
end

-- The streams by line (from 1) of lane 0 and of the lanes that the caller declares; and how many keys come before those.
local function declared_lines()
  local streams, names = { KEYS[1], KEYS[2], KEYS[3], KEYS[4] }, ARGV[#ARGV]
  if names == '' then return streams, #KEYS end
  local lanes = numbers_in(names)
  local before = #KEYS - WIDTH * #lanes
  for i, lane in ipairs(lanes) do
    for offset = 1, WIDTH do streams[WIDTH * lane + offset] = KEYS[before + WIDTH * (i - 1) + offset] end
  end
  return streams, before
end

-- What to answer if some of these lanes are not declared: {'lanes', tenant ('': whoever), lane, …}; nil if all are.
local function undeclared(streams, lanes)
  local reply
  for _, lane in ipairs(lanes) do
    if not streams[WIDTH * lane + 1] then
      reply = reply or { 'lanes' }
      reply[#reply + 1], reply[#reply + 2] = '', lane
    end
  end
  return reply
end

-- The same for the lanes that records point at.
local function undeclared_places(streams, records)
  local lanes = {}
  for _, record in pairs(records) do
    local line = record and split_place(place_of(record))
    if line and line >= WIDTH then lanes[#lanes + 1] = lane_of_line(line) end
  end
  return undeclared(streams, lanes)
end

-- What operators allow, by lane: `limits` in the controls. Below zero: no limit.
local function limits_in(packed)
  local limits, values = {}, packed and cmsgpack.unpack(packed) or {}
  for i = 1, #values, 4 do
    limits[values[i]] = { weight = values[i + 1], concurrency = values[i + 2], intake = values[i + 3] }
  end
  return limits
end

local function backlog_of(streams, lane)
  local count = 0
  for line = WIDTH * lane + 1, WIDTH * lane + WIDTH do count = count + call('XLEN', streams[line]) end
  return count
end

-- Jobs in line or running: what limits are about. Retries that only wait in the pending list are neither.
local function load_of(streams, lane, group, parking)
  local count = backlog_of(streams, lane)
  for line = WIDTH * lane + 1, count > 0 and WIDTH * lane + WIDTH or 0 do
    for _, consumer in ipairs(pending(streams[line], group)[4] or {}) do
      if consumer[1] == parking then count = count - tonumber(consumer[2]) end
    end
  end
  return count
end

-- Leases that are held in a lane; retries that only wait in the pending list are none.
local function leased_in(streams, lane, group, parking)
  local count = 0
  for line = WIDTH * lane + 1, WIDTH * lane + WIDTH do
    local summary = pending(streams[line], group)
    count = count + (summary[1] or 0)
    for _, consumer in ipairs(summary[4] or {}) do
      if consumer[1] == parking then count = count - tonumber(consumer[2]) end
    end
  end
  return count
end

-- How many more of a lane may run; nil: as many as there are.
local function room_in(streams, limits, lane, group, parking)
  local limit = limits[lane]
  if not limit or limit.concurrency < 0 then return nil end
  return math.max(0, limit.concurrency - leased_in(streams, lane, group, parking))
end

local function nudge(wake)
  redis.call('XADD', wake, 'MAXLEN', 1, '*', 'more', 1)
end

-- Leases of these lines ended: whoever waits for a limited tenant's place has to look.
local function nudge_if_limited(wake, packed, lines)
  if not packed then return end
  local limits = limits_in(packed)
  for line in pairs(lines) do
    local limit = limits[lane_of_line(line)]
    if limit and limit.concurrency >= 0 then return nudge(wake) end
  end
end

-- Where tenants' next messages go. `seat` reads and decides; `open_lanes` writes, once nothing is missing.
local function seating_of(streams, key, control, group)
  return { streams = streams, key = key, control = control, group = group, lane_of = { default = 0, [''] = 0 }, used = {},
    given = {}, seats = {}, gone = {}, shared = {}, missing = { 'lanes' } }
end

local function look_at_lanes(seating)
  local controls = redis.call('HMGET', seating.control, 'lanes', 'limits')
  seating.active, seating.is_active = numbers_in(controls[1]), {}
  for _, lane in ipairs(seating.active) do seating.is_active[lane] = true end
  seating.reserved = limits_in(controls[2])
end

local function give_lane(seating, tenant, lane, owner)
  if owner then seating.gone[#seating.gone + 1] = owner end
  seating.given[lane], seating.seats[tenant] = tenant, number(lane)
  return lane
end

-- A lane for a tenant that has none: one that is nobody's, else one that nobody uses, else a part of the shortest one.
local function find_lane(seating, tenant)
  local owners, rows, now = {}, redis.call('HGETALL', seating.key), now_ms()
  for i = 1, #rows, 2 do
    local lane, ends = string.match(rows[i + 1], '^(%d+) ?(%d*)$')
    if ends == '' then
      owners[tonumber(lane)] = rows[i]
    elseif tonumber(ends) <= now and rows[i] ~= tenant then
      seating.gone[#seating.gone + 1] = rows[i]
    end
  end
  for lane = 1, LANES do
    if not owners[lane] and not seating.given[lane] then return give_lane(seating, tenant, lane) end
  end
  local free = {}
  for lane = 1, LANES do
    if not seating.reserved[lane] and not seating.given[lane] then
      if not seating.is_active[lane] and not seating.used[lane] then return give_lane(seating, tenant, lane, owners[lane]) end
      free[#free + 1] = lane
    end
  end
  if #free == 0 then return 0 end
  local unknown = undeclared(seating.streams, free)
  if unknown then
    seating.missing = unknown
    return nil
  end
  local shortest, fewest
  for _, lane in ipairs(free) do
    local count = backlog_of(seating.streams, lane) + (seating.shared[lane] or 0) + (seating.used[lane] and 1 or 0)
    if not fewest or count < fewest then shortest, fewest = lane, count end
  end
  if fewest == 0 and leased_in(seating.streams, shortest, seating.group, '') == 0 then
    return give_lane(seating, tenant, shortest, owners[shortest])
  end
  seating.shared[shortest] = (seating.shared[shortest] or 0) + 1
  seating.seats[tenant] = number(shortest) .. ' ' .. number(now + SHARED_MS)
  return shortest
end

-- The lane in which this tenant's next message goes; nil if the caller has to declare more first.
local function seat(seating, tenant)
  local lane = seating.lane_of[tenant]
  if lane then return lane end
  if not seating.active then look_at_lanes(seating) end
  local known = redis.call('HGET', seating.key, tenant)
  if known then
    local own, ends = string.match(known, '^(%d+) ?(%d*)$')
    own = tonumber(own)
    -- A guest leaves a lane that has become a named tenant's.
    if ends == '' or (tonumber(ends) > now_ms() and not seating.reserved[own]) then lane = own end
  end
  lane = lane or find_lane(seating, tenant)
  if not lane then return nil end
  seating.lane_of[tenant] = lane
  if lane > 0 then
    seating.used[lane] = true
    local missing = seating.missing
    if not seating.streams[WIDTH * lane + 1] then missing[#missing + 1], missing[#missing + 2] = tenant, lane end
  end
  return lane
end

-- What to answer if lanes are not declared; nil if all are.
local function missing_lanes(seating)
  return #seating.missing > 1 and seating.missing or nil
end

-- HSET and XGROUP come before HDEL: a full Redis has to refuse a submission.
local function open_lanes(seating, wake)
  local new = false
  for lane in pairs(seating.used) do
    if not seating.is_active[lane] then
      for line = WIDTH * lane + 1, WIDTH * lane + DIRECT do
        redis.pcall('XGROUP', 'CREATE', seating.streams[line], seating.group, '0', 'MKSTREAM')
      end
      seating.active[#seating.active + 1], new = lane, true
    end
  end
  if new then redis.call('HSET', seating.control, 'lanes', table.concat(seating.active, ' ')) end
  for tenant, lane in pairs(seating.seats) do redis.call('HSET', seating.key, tenant, lane) end
  for _, tenant in ipairs(seating.gone) do
    if not seating.seats[tenant] then redis.call('HDEL', seating.key, tenant) end
  end
  if next(seating.used) then nudge(wake) end
end
