-- bury: an entry becomes a dead letter, in one step, so there is never none of it and never two.
-- KEYS  1 stream  2 stream of dead letters
-- ARGV  1 group  2 consumer  3 '1' to delete the entry as well  4 entry id  5 its deliveries  6.. fields of the letter
-- Reply 1, or 0 if the entry is not the consumer's any more
local stream, group, id = KEYS[1], ARGV[1], ARGV[4]
if not holds(stream, group, ARGV[2], id, ARGV[5]) then
  return 0
end
local fields = {}
for at = 6, #ARGV do
  fields[#fields + 1] = ARGV[at]
end
-- First: where this fails, the entry is as it was.
redis.call('XADD', KEYS[2], '*', unpack(fields))
redis.call('XACK', stream, group, id)
if ARGV[3] == '1' then
  redis.call('XDEL', stream, id)
end
return 1
