-- claim: lease ready jobs. Writes nothing per job: the pending list is the lease.
-- KEYS   1-4 streams  5 feed  6 control  7 wake  8 workers  then streams of further lanes
-- ARGV   1 group  2 worker  3 limit  4 nonce  5 feed limit  6 wake group  7-9 priorities in reading order
--        10 consumer that holds retries in the pending list  11 declared lanes
-- Reply  {'paused'} | {'lanes', …} | {'ok', now, lanes in use, stream index, entries, …} | {'nogroup', …the same}
--        | {'limited', …the same}: the queue runs as many jobs as it may
local streams = declared_streams()
local feed_key, control, wake, workers = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local group, worker, limit, nonce, feed_limit, wake_group = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local retry_consumer = ARGV[10]

local controls = redis.call('HMGET', control, 'paused', 'reader', 'lanes', 'limits', 'turns', 'marker')
if controls[1] == '1' then return { 'paused' } end
local marker = controls[6]
local active = numbers_in(controls[3])
local missing = undeclared_lanes(streams, active)
if missing then return missing end

check_types({ feed_key, wake }, { workers }, {})
local now = format_integer(now_ms())
local reply, moves, free = { 'ok', now, controls[3] or '' }, {}, limit
local slots -- how many more jobs of the queue may run; nil: no limit

-- Lease up to `count` messages of a stream; returns how many.
local function read(index, count)
  -- pcall: a missing group must not lose the entries of the streams read before.
  local got = redis.pcall('XREADGROUP', 'GROUP', group, worker, 'COUNT', count, 'STREAMS', streams[index + 1], '>')
  if not got then return 0 end
  if got.err then
    if not string.find(got.err, 'NOGROUP', 1, true) then error(got.err) end
    reply[1] = 'nogroup'
    return 0
  end
  local entries = got[1][2]
  free = free - #entries
  if slots then slots = slots - #entries end
  reply[#reply + 1] = index
  reply[#reply + 1] = entries
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    if is_native(fields, marker) then
      local m = #moves
      moves[m + 1], moves[m + 2], moves[m + 3] = fields[4], fields[2], #fields == 8 and '' or tenant_of(fields)
    end
  end
  return #entries
end

-- Weighted fair shares (stride scheduling). Each stream has a pass: the number of jobs claimed from it, divided by its weight,
-- in excess of the lowest pass. The stream with the lowest pass comes first and gets its share of the limit; what it does not
-- use goes to the others. An empty stream loses its pass and starts again at the lowest: it does not accumulate a share.
-- Passes are kept per queue, so that claims of a single job are fair, too.
local function claim_fairly()
  -- First: a full Redis allows it, and then the rest of the script.
  redis.call('XDEL', wake, '0-0')
  local limits, passes, spare, used = decode_limits(controls[4]), {}, {}, {}
  local kept = controls[5] and unpack_table(controls[5]) or {}
  for i = 1, #kept, 2 do
    if is_count(kept[i]) and is_count(kept[i + 1]) then passes[kept[i]] = kept[i + 1] end
  end
  local lanes = { 0, unpack(active) }
  for _, lane in ipairs(lanes) do spare[lane] = free_slots_in(streams, limits, lane, group, retry_consumer) end
  slots = free_slots_in_queue(streams, limits, active, group, retry_consumer)
  -- What the queue may not run is not shared out either.
  local withheld = slots and math.max(0, free - slots) or 0
  free = free - withheld

  for arg = 7, 9 do
    if free <= 0 then break end
    local priority = tonumber(ARGV[arg])
    local function index_of(lane) return STREAMS_PER_LANE * lane + priority end
    local function weight_of(lane) return limits[lane] and limits[lane].weight or 1 end
    local function pass_of(lane) return passes[index_of(lane)] or 0 end
    local function comes_before(one, other)
      local first, second = pass_of(one), pass_of(other)
      if first ~= second then return first < second end
      return one < other
    end
    local waiting = {}
    for _, lane in ipairs(lanes) do
      if call('XLEN', streams[index_of(lane) + 1]) == 0 then
        passes[index_of(lane)] = nil
      elseif spare[lane] ~= 0 then
        waiting[#waiting + 1] = lane
      end
    end
    while free > 0 and #waiting > 0 do
      table.sort(waiting, comes_before)
      local total, whole, still = 0, free, {}
      for _, lane in ipairs(waiting) do total = total + weight_of(lane) end
      for _, lane in ipairs(waiting) do
        if free <= 0 then
          still[#still + 1] = lane
        else
          local index, weight = index_of(lane), weight_of(lane)
          local share = math.min(free, math.ceil(whole * weight / total), spare[lane] or free)
          local got = read(index, share)
          if spare[lane] then spare[lane] = spare[lane] - got end
          used[lane] = used[lane] or got > 0
          passes[index] = got == share and pass_of(lane) + got / weight or nil
          if got == share and spare[lane] ~= 0 then still[#still + 1] = lane end
        end
      end
      waiting = still
    end
    local lowest
    for _, lane in ipairs(waiting) do lowest = math.min(lowest or pass_of(lane), pass_of(lane)) end
    for _, lane in ipairs(lanes) do
      local index = index_of(lane)
      if passes[index] then passes[index] = math.max(0, passes[index] - (lowest or 0)) end
    end
  end
  free = free + withheld
  return passes, used
end

-- Delete the streams, with their consumers, of lanes without ready or running jobs.
local function save_lanes_in_use(used)
  local left = {}
  for _, lane in ipairs(active) do
    if used[lane] or backlog_of(streams, lane) > 0 or leases_in(streams, lane, group, '') > 0 then
      left[#left + 1] = lane
    else
      redis.call('DEL', unpack(streams, STREAMS_PER_LANE * lane + 1, STREAMS_PER_LANE * lane + STREAMS_PER_LANE))
    end
  end
  if #left < #active then
    reply[3] = table.concat(left, ' ')
    redis.call('HSET', control, 'lanes', reply[3])
  end
end

if #active == 0 and not controls[4] then
  for arg = 7, 9 do
    if free <= 0 then break end
    read(tonumber(ARGV[arg]), free)
  end
else
  -- Checked first: entries of other lanes must not be claimed twice because lane 0 has no groups yet.
  for index = 1, DIRECT do
    if redis.pcall('XPENDING', streams[index], group, '-', '+', 1).err then return { 'nogroup', now, reply[3] } end
  end
  local passes, used = claim_fairly()
  local kept = {}
  for index, pass in pairs(passes) do
    if pass > 0 then kept[#kept + 1], kept[#kept + 2] = index, pass end
  end
  if #kept > 0 then
    redis.call('HSET', control, 'turns', cmsgpack.pack(kept))
  elseif controls[5] then
    redis.call('HDEL', control, 'turns')
  end
  save_lanes_in_use(used)
end
append_feed(feed_key, feed_limit, controls[2], nonce, 'claimed', now, worker, moves)
redis.call('ZADD', workers, now, worker)

if reply[1] == 'ok' then
  if free > 0 then
    -- Below the limit: nothing else may run. Workers that wait from now on are woken by the next message or wake entry.
    for _, stream in ipairs({ streams[1], streams[2], streams[3], wake }) do
      if redis.pcall('XGROUP', 'SETID', stream, wake_group, '$').err then reply[1] = 'nogroup' end
    end
  elseif slots ~= 0 then
    -- There may be more: wake one other worker.
    wake_one(wake)
  end
  if slots == 0 and reply[1] == 'ok' then reply[1] = 'limited' end
end
return reply
