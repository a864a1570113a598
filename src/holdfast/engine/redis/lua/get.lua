-- get: jobs as they are at one moment. Reads only.
-- KEYS   1-3 streams  4 waiting  5 retry  6 delayed  then records
-- ARGV   1 group  then the job ids
-- Reply  for each: '' | {record} | {record, '', due} | {record, fields, owner, deliveries, due}
local group = ARGV[1]
local reply = {}
for i = 7, #KEYS do
  local job_id = ARGV[i - 5]
  local record = redis.call('GET', KEYS[i])
  if not record then
    reply[i - 6] = ''
  else
    local place, state = header_of(record)
    local line, id = split_place(place)
    if line then
      local entry = redis.call('XRANGE', KEYS[line + 1], id, id)[1]
      local row = redis.call('XPENDING', KEYS[line + 1], group, id, id, 1)[1] or {}
      local due = state == 'retrying' and redis.call('ZSCORE', KEYS[4], job_id) or ''
      reply[i - 6] = { record, entry and entry[2] or {}, row[2] or '', row[4] or 0, due or '' }
    elseif state == 'retrying' or state == 'queued' then
      reply[i - 6] = { record, '', redis.call('ZSCORE', state == 'retrying' and KEYS[5] or KEYS[6], job_id) or '' }
    else
      reply[i - 6] = { record }
    end
  end
end
return reply
