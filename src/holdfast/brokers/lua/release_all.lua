-- release_all: return all entries of a consumer and delete it. Another consumer reclaims them.
-- KEYS  1 stream
-- ARGV  1 group  2 consumer  3 consumer that receives the entries  4 treceiver idle ms, enough to be reclaimed
-- Reply number of entries returned
local stream, group, me, receiver, idle = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local released = 0
local rows = redis.call('XPENDING', stream, group, '-', '+', 500, me)
while #rows > 0 do
  for _, row in ipairs(rows) do
    if #redis.call('XRANGE', stream, row[1], row[1]) == 0 then
      redis.call('XACK', stream, group, row[1])
    else
      redis.call('XCLAIM', stream, group, receiver, 0, row[1], 'IDLE', idle, 'JUSTID')
      released = released + 1
    end
  end
  rows = redis.call('XPENDING', stream, group, '-', '+', 500, me)
end
redis.call('XGROUP', 'DELCONSUMER', stream, group, me)
return released
