-- job_names: ids and tenants of the jobs in one stream, without their payloads.
-- KEYS   1 stream
-- ARGV   1 id of the last message read ('-': none)  2 limit
-- Reply  {id of the last message ('': there was none), then job id, tenant ('': the default tenant)}
local reply = { '' }
-- Redis 6.0 has no range without its first message.
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2] + 1)) do
  local fields, job_id = entry[2], nil
  for i = 1, #fields, 2 do job_id = fields[i] == 'task_id' and fields[i + 1] or job_id end
  if entry[1] ~= ARGV[1] then
    reply[1] = entry[1]
    if job_id then reply[#reply + 1], reply[#reply + 2] = job_id, tenant_of(fields) end
  end
end
return reply
