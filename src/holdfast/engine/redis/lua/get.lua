-- get: a consistent read of jobs. With register waiters, callers are notified when jobs that have not finished finish.
-- KEYS   1-4 streams  5 waiting  6 retry  7 delayed  8 waiters  9 control  then records, then streams of further lanes
-- ARGV   1 group  2 register waiters (1|0)  then the job ids, then declared lanes
-- Reply  {'lanes', …} | for each: '' | {record} | {record, '', due} | {record, fields, owner, deliveries, due}
local streams, last = declared_streams()
local group, registers, waiting, retry, delayed, waiters = ARGV[1], ARGV[2] == '1', KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local FIRST_KEY = 9

local records = {}
for i = 1, last - FIRST_KEY do records[i] = redis.call('GET', KEYS[FIRST_KEY + i]) end
local missing = undeclared_positions(streams, records)
if missing then return missing end

local reply, marker = {}, redis.call('HGET', KEYS[9], 'marker')
for i, record in ipairs(records) do
  local job_id = ARGV[2 + i]
  if not record then
    reply[i] = ''
  else
    local position, state = parse_record(record)
    local index, id = split_position(position)
    if registers and next(MOVES[state] or {}) then redis.call('HSET', waiters, job_id, 1) end
    if index then
      local entry = redis.call('XRANGE', streams[index + 1], id, id)[1]
      if entry then is_native(entry[2], marker, record, position) end
      local row = pending(streams[index + 1], group, id, id, 1)[1] or {}
      local due = state == 'retrying' and redis.call('ZSCORE', waiting, job_id) or ''
      reply[i] = { record, entry and entry[2] or {}, row[2] or '', row[4] or 0, due or '' }
    elseif state == 'retrying' or state == 'queued' then
      reply[i] = { record, '', redis.call('ZSCORE', state == 'retrying' and retry or delayed, job_id) or '' }
    else
      reply[i] = { record }
    end
  end
end
return reply
