-- create_groups: create both groups on every stream, starting at 0: `$` would skip existing messages. Also the marker.
-- KEYS   1-4 streams  5 wake  6 control  then streams of further lanes
-- ARGV   1 group  2 wake group  3 a new marker, used if there is none  then declared lanes
-- Reply  number of messages
-- XDEL comes first: a full Redis allows it, and then the rest of the script. A first worker must be able to drain a full Redis.
local streams = declared_streams()
local group, wake_group, wake = ARGV[1], ARGV[2], KEYS[5]
redis.call('XDEL', wake, '0-0')
redis.call('HSETNX', KEYS[6], 'marker', ARGV[3])
local function make(stream, name)
  local made = redis.pcall('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
end

local failed, count = make(wake, wake_group), 0
for index = 1, DIRECT do
  failed = failed or make(streams[index], group) or make(streams[index], wake_group)
end
for index, stream in pairs(streams) do
  -- Streams of further lanes exist only while in use. No worker waits on them: their jobs come with a wake entry.
  if not failed and redis.call('EXISTS', stream) == 1 then
    failed = make(stream, group)
    count = count + redis.call('XLEN', stream)
    -- `claim` does not read the stream of jobs claimed by id: an unread message there is a lost lease.
    while not failed and (index - 1) % STREAMS_PER_LANE == DIRECT do
      if not redis.call('XREADGROUP', 'GROUP', group, '~lost', 'COUNT', CHUNK, 'STREAMS', stream, '>') then break end
    end
  end
end
return failed or count
