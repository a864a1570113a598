-- claim_job: lease one waiting job by id. Its message moves to the stream of its tenant's lane that `claim` does not read.
-- KEYS   1-4 streams  5 feed  6 delayed  7 retry  8 waiting  9 control  10 wake  11 lanes  12 workers  13 record
--        then streams of further lanes
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 job id  6 consumer that holds retries in the pending list
--        7 declared lanes
-- Reply  {'unknown'} | {'lanes', …} | {'illegal', state} | {'limited', limit} | {'ok', now, stream index, entry}
local streams = declared_streams()
local feed_key, control, wake, workers, record_key = KEYS[5], KEYS[9], KEYS[10], KEYS[12], KEYS[13]
local group, worker, nonce, feed_limit, job_id, retry_consumer = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local assignment = new_assignment(streams, KEYS[11], control, group)

local record = redis.call('GET', record_key)
if not record then return { 'unknown' } end
local missing = undeclared_positions(streams, { record })
if missing then return missing end
local position, state, token, packed = parse_record(record)
local index, id = split_position(position)
local row = index and pending(streams[index + 1], group, id, id, 1)[1]
if row and row[2] ~= retry_consumer then return { 'illegal', 'running' } end
if not MOVES[state] then return { 'unknown' } end
if state ~= 'queued' and state ~= 'retrying' then return { 'illegal', state } end

-- The job is in its record, or else in its message.
local body = packed ~= '' and unpack_body(packed)
local entry = not body and index and redis.call('XRANGE', streams[index + 1], id, id)[1]
if not body and not entry then return { 'unknown' } end
local tenant = body and body[TENANT] or tenant_of(entry[2])
local lane = lane_for_tenant(assignment, tenant)
missing = missing_lanes(assignment)
if missing then return missing end
local controls = redis.call('HMGET', control, 'reader', 'limits', 'lanes')
local limits, active = decode_limits(controls[2]), numbers_in(controls[3])
missing = limits[WHOLE_QUEUE] and undeclared_lanes(streams, active)
if missing then return missing end
if free_slots_in_queue(streams, limits, active, group, retry_consumer) == 0 then
  return { 'limited', limits[WHOLE_QUEUE].concurrency }
end
check_types({ feed_key, wake }, { KEYS[6], KEYS[7], KEYS[8], workers }, { control, KEYS[11] })
check_types(streams, {}, {})

-- XACK and ZREM come first: a full Redis allows them, and then the rest of the script.
if index then
  redis.call('XACK', streams[index + 1], group, id)
  redis.call('XDEL', streams[index + 1], id)
end
for i = 6, 8 do redis.call('ZREM', KEYS[i], job_id) end
open_lanes(assignment, wake)
local to_index = STREAMS_PER_LANE * lane + DIRECT
local stream = streams[to_index + 1]
redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
if body then
  position = append_message(assignment, to_index, body, state, job_id)
else
  if is_native(entry[2], assignment.marker, record, position) then entry[2][1] = assignment.marker end
  position = POSITION_PREFIX[to_index] .. redis.call('XADD', stream, '*', unpack(entry[2]))
end
local _, new_id = split_position(position)
local claimed
repeat -- a group that was created again delivers older messages first; those are lost leases
  claimed = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', stream, '>')[1][2][1]
until claimed[1] == new_id
redis.call('SET', record_key, position .. ' ' .. state .. ' ' .. token)
local fields, now = claimed[2], format_integer(now_ms())
local head = is_native(fields, assignment.marker) and fields[2] or ''
append_feed(feed_key, feed_limit, controls[1], nonce, 'claimed', now, worker, { job_id, head, tenant_of(fields) })
redis.call('ZADD', workers, now, worker)
return { 'ok', now, to_index, claimed }
