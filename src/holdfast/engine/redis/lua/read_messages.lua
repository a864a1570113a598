-- read_messages: messages of leases that this worker may have, with verified markers.
-- KEYS   1-4 streams  5 control  then streams of further lanes
-- ARGV   1 group  2 n  then 2 per message: stream index, message id, then declared lanes
-- Reply  for each: the entry | '' (deleted: its row would stay in the pending list for ever, so it is acknowledged)
local streams = declared_streams()
local marker, reply = redis.call('HGET', KEYS[5], 'marker'), {}
for i = 1, tonumber(ARGV[2]) do
  local stream, id = streams[ARGV[2 * i + 1] + 1], ARGV[2 * i + 2]
  local entry = redis.call('XRANGE', stream, id, id)[1]
  if entry then
    is_native(entry[2], marker)
  else
    redis.call('XACK', stream, ARGV[1], id)
  end
  reply[i] = entry or ''
end
return reply
