-- ack: acknowledge entries that are still pending for the consumer; skip the others.
-- KEYS  1 stream
-- ARGV  1 group  2 consumer  3 '1' to delete the entries as well  4.. entry id, delivery count
-- Reply number of entries acknowledged
local stream, group, me, delete = KEYS[1], ARGV[1], ARGV[2], ARGV[3] == '1'
local settled = 0
for at = 4, #ARGV, 2 do
  if holds(stream, group, me, ARGV[at], ARGV[at + 1]) then
    redis.call('XACK', stream, group, ARGV[at])
    if delete then
      redis.call('XDEL', stream, ARGV[at])
    end
    settled = settled + 1
  end
end
return settled
