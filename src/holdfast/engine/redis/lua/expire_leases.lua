-- expire_leases: let leases of a worker that has certainly ended expire now, for `reclaim` to claim. Delivery counts stay.
-- KEYS   1-4 streams  5 control  then streams of further lanes
-- ARGV   1 group  2 worker  3 visibility timeout  4 limit  then declared lanes
-- Reply  {'lanes', …} | number of leases
local streams = declared_streams()
local group, worker, timeout, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local missing = undeclared_lanes(streams, numbers_in(redis.call('HGET', KEYS[5], 'lanes')))
if missing then return missing end

local SCAN = 1000
local count = 0
for _, stream in pairs(streams) do
  local start = '-'
  repeat
    local rows = pending(stream, group, start, '+', SCAN, worker)
    for _, row in ipairs(rows) do
      if row[3] < timeout and count < limit then
        redis.call('XCLAIM', stream, group, worker, 0, row[1], 'IDLE', timeout, 'JUSTID')
        count = count + 1
      end
      start = row[1] -- read again: before Redis 6.2 a range cannot exclude it
    end
  until #rows < SCAN or count >= limit
end
return count
