-- uses: lanes
-- create_groups: both groups on every line, from the beginning: never `$`, which would skip what waits already.
-- KEYS   1-4 streams  5 wake  then streams of further lanes
-- ARGV   1 group  2 wake group  then the lanes that are declared
-- Reply  how many messages are there
-- XDEL comes first: it is allowed on a full Redis, and then so is the rest. A first worker must be able to drain one.
local streams = declared_streams()
local group, wake_group, wake = ARGV[1], ARGV[2], KEYS[5]
redis.call('XDEL', wake, '0-0')
local function make(stream, name)
  local made = redis.pcall('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
end

local failed, count = make(wake, wake_group), 0
for index = 1, DIRECT do
  failed = failed or make(streams[index], group) or make(streams[index], wake_group)
end
for index, stream in pairs(streams) do
  -- Streams of further lanes are there as long as they are in use. Nobody waits on them: their jobs come with a nudge.
  if not failed and redis.call('EXISTS', stream) == 1 then
    failed = make(stream, group)
    count = count + redis.call('XLEN', stream)
    -- Nobody claims from the line of jobs that were taken: what is there unread was a lease, and is a lost one now.
    while not failed and (index - 1) % STREAMS_PER_LANE == DIRECT do
      if not redis.call('XREADGROUP', 'GROUP', group, '~lost', 'COUNT', CHUNK, 'STREAMS', stream, '>') then break end
    end
  end
end
return failed or count
