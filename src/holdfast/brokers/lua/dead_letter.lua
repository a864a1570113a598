-- dead_letter: move an entry to the stream of dead letters, in one atomic step.
-- KEYS  1 stream  2 stream of dead letters
-- ARGV  1 group  2 consumer  3 '1' to delete the entry as well  4 entry id  5 delivery count  6.. fields of the dead letter
-- Reply 1, or 0 if the entry is no longer pending for the consumer
local stream, group, id = KEYS[1], ARGV[1], ARGV[4]
if not holds(stream, group, ARGV[2], id, ARGV[5]) then
  return 0
end
local fields = {}
for at = 6, #ARGV do
  fields[#fields + 1] = ARGV[at]
end
-- Written first: if XADD fails, the entry is unchanged.
redis.call('XADD', KEYS[2], '*', unpack(fields))
redis.call('XACK', stream, group, id)
if ARGV[3] == '1' then
  redis.call('XDEL', stream, id)
end
return 1
