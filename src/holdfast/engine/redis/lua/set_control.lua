-- set_control: change an operator's controls of a queue; all listeners and waiting workers are notified.
-- KEYS   1 control  2 notices  3 wake  4 feed  5 lanes
-- ARGV   1 nonce  2 feed limit  3 the operator's event ('': none)  4 its data  5 packed, 4 values per named tenant: tenant,
--        weight, concurrency, intake limit (below zero: none)  6 compare with expected values (1|0)
--        then 3 per control: field, value ('' removes it), expected value
-- Reply  'changed' | 'ok'
local control, notices, wake, feed_key, lanes_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local named = cmsgpack.unpack(ARGV[5])
local FIRST_ARG = 6

if ARGV[6] == '1' then
  for i = FIRST_ARG + 1, #ARGV, 3 do
    if (redis.call('HGET', control, ARGV[i]) or '') ~= ARGV[i + 2] then return 'changed' end
  end
end
check_types({ notices, wake, feed_key }, {}, { lanes_key })

-- Each named tenant gets its own lane, which is never released: the lane that it does not share, else one without an owner,
-- else an unused one, else one of the further lanes, which only named tenants get. Its limits must not apply to jobs of
-- other tenants in the lane.
local is_named, limits, assignments, released, assigned, shared = {}, {}, {}, {}, { [0] = true }, {}
for i = 1, #named, 4 do is_named[named[i]] = true end
local owners, own, active = {}, { default = 0 }, {}
local rows = redis.call('HGETALL', lanes_key)
for i = 1, #rows, 2 do
  local guest, ends = parse_owner(rows[i + 1])
  if guest and ends > 0 then shared[guest] = true end
end
for i = 1, #rows, 2 do
  local lane, ends = parse_owner(rows[i + 1])
  if lane and ends == 0 and not (shared[lane] and is_named[rows[i]]) then
    owners[lane], own[rows[i]] = rows[i], lane
    if is_named[rows[i]] then assigned[lane] = true end
  end
end
for _, lane in ipairs(numbers_in(redis.call('HGET', control, 'lanes'))) do active[lane] = true end
local function first_lane(first, last, fits)
  for lane = first, last do
    if not assigned[lane] and fits(lane) then return lane end
  end
end
local function is_unowned(lane) return not owners[lane] and not active[lane] end
local function is_unused(lane) return not active[lane] end
local function is_any() return true end
for i = 1, #named, 4 do
  local lane = own[named[i]]
  if not lane then
    lane = first_lane(1, LANES, is_unowned) or first_lane(1, LANES, is_unused)
      or first_lane(LANES + 1, 2 * LANES, is_unowned) or first_lane(LANES + 1, 2 * LANES, is_unused)
      or first_lane(LANES + 1, 2 * LANES, is_any)
    assigned[lane], assignments[named[i]] = true, format_integer(lane)
    if owners[lane] then released[#released + 1] = owners[lane] end
  end
  for _, value in ipairs({ lane, named[i + 1], named[i + 2], named[i + 3] }) do limits[#limits + 1] = value end
end

for i = FIRST_ARG + 1, #ARGV, 3 do
  if ARGV[i] == 'max_running' and ARGV[i + 1] ~= '' then
    for _, value in ipairs({ WHOLE_QUEUE, 1, tonumber(ARGV[i + 1]), -1 }) do limits[#limits + 1] = value end
  end
end

-- HDEL comes first: a full Redis allows it, and then the rest of the script.
redis.call('HDEL', control, 'limits')
if #released > 0 then redis.call('HDEL', lanes_key, unpack(released)) end
for tenant, lane in pairs(assignments) do redis.call('HSET', lanes_key, tenant, lane) end
if #limits > 0 then redis.call('HSET', control, 'limits', cmsgpack.pack(limits)) end
for i = FIRST_ARG + 1, #ARGV, 3 do
  redis.call('HDEL', control, ARGV[i])
  if ARGV[i + 1] ~= '' then redis.call('HSET', control, ARGV[i], ARGV[i + 1]) end
end
if ARGV[3] ~= '' then
  local moves = { ARGV[3], '', '', '', 0, 0, ARGV[4], '' }
  append_feed(feed_key, ARGV[2], redis.call('HGET', control, 'reader'), ARGV[1], 'operator', format_integer(now_ms()), '', moves)
end
redis.call('XADD', notices, 'MAXLEN', '~', 1000, '*', 'controlled', '1')
wake_one(wake)
return 'ok'
