-- renew: extend the visibility timeout of the consumer's entries in flight.
-- KEYS  1 stream
-- ARGV  1 group  2 consumer  3.. entry id, delivery count
-- Reply ids of entries no longer pending for the consumer
local stream, group, me = KEYS[1], ARGV[1], ARGV[2]
local lost = {}
for at = 3, #ARGV, 2 do
  if holds(stream, group, me, ARGV[at], ARGV[at + 1]) then
    redis.call('XCLAIM', stream, group, me, 0, ARGV[at], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[at]
  end
end
return lost
