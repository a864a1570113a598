-- take: lease one job, wherever it waits. Its message goes in the line of its tenant's lane from which nobody claims.
-- KEYS   1-4 streams  5 feed  6 delayed  7 retry  8 waiting  9 control  10 wake  11 lanes  12 workers  13 record
--        then streams of further lanes
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 job id  6 consumer that holds retries in the pending list
--        7 the lanes that are declared
-- Reply  {'unknown'} | {'lanes', …} | {'illegal', state} | {'ok', now, line, entry}
local streams = declared_lines()
local feed_key, control, wake, workers, record_key = KEYS[5], KEYS[9], KEYS[10], KEYS[12], KEYS[13]
local group, worker, nonce, feed_limit, job_id, parking = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local seating = seating_of(streams, KEYS[11], control, group)

local record = redis.call('GET', record_key)
if not record then return { 'unknown' } end
local missing = undeclared_places(streams, { record })
if missing then return missing end
local place, state, token, packed = header_of(record)
local line, id = split_place(place)
local row = line and pending(streams[line + 1], group, id, id, 1)[1]
if row and row[2] ~= parking then return { 'illegal', 'running' } end
if state ~= 'queued' and state ~= 'retrying' then return { 'illegal', state } end

-- The job is in its record, or else in its message.
local body = packed ~= '' and cmsgpack.unpack(packed)
local entry = not body and line and redis.call('XRANGE', streams[line + 1], id, id)[1]
if not body and not entry then return { 'unknown' } end
local tenant = body and body[TENANT] or tenant_of(entry[2])
local lane = seat(seating, tenant)
missing = missing_lanes(seating)
if missing then return missing end
check_types({ feed_key, wake }, { KEYS[6], KEYS[7], KEYS[8], workers }, { control, KEYS[11] })
check_types(streams, {}, {})

-- XACK and ZREM come first: they are allowed on a full Redis, and then so is the rest.
if line then
  redis.call('XACK', streams[line + 1], group, id)
  redis.call('XDEL', streams[line + 1], id)
end
for i = 6, 8 do redis.call('ZREM', KEYS[i], job_id) end
open_lanes(seating, wake)
local to_line = WIDTH * lane + DIRECT
local stream = streams[to_line + 1]
redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
if body then
  place = put_in_line(streams, to_line, body, state, job_id)
else
  place = PLACE[to_line] .. redis.call('XADD', stream, '*', unpack(entry[2]))
end
local _, new_id = split_place(place)
local taken
repeat -- a group that was made anew has older ones to tell of first; those are lost leases
  taken = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', stream, '>')[1][2][1]
until taken[1] == new_id
redis.call('SET', record_key, place .. ' ' .. state .. ' ' .. token)
local fields, now = taken[2], number(now_ms())
local head = is_ours(fields) and fields[2] or ''
feed(feed_key, feed_limit, redis.call('HGET', control, 'reader'), nonce, 'claimed', now, worker, { job_id, head, tenant_of(fields) })
redis.call('ZADD', workers, now, worker)
return { 'ok', now, to_line, taken }
