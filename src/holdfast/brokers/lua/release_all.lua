-- leave: a consumer gives back what it has and goes. It is taken up by whoever looks next.
-- KEYS  1 stream
-- ARGV  1 group  2 consumer  3 heir  4 idle ms that others take over from
-- Reply how many it gave back
local stream, group, me, heir, idle = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local given = 0
local rows = redis.call('XPENDING', stream, group, '-', '+', 500, me)
while #rows > 0 do
  for _, row in ipairs(rows) do
    if #redis.call('XRANGE', stream, row[1], row[1]) == 0 then
      redis.call('XACK', stream, group, row[1])
    else
      redis.call('XCLAIM', stream, group, heir, 0, row[1], 'IDLE', idle, 'JUSTID')
      given = given + 1
    end
  end
  rows = redis.call('XPENDING', stream, group, '-', '+', 500, me)
end
redis.call('XGROUP', 'DELCONSUMER', stream, group, me)
return given
