"""Work other than chat: jobs of tasks that outlive the server that runs them (DeepServe 3).

- `job_states`, `job_records`: jobs and their tasks, and the allowed changes of their states
- `state_file`, `job_store`, `lease`: the SQLite file with all of it, and the lease to move jobs on
- `member_table`, `cluster_manager`: the servers of a cluster, and the restart of lost ones
- `task_work`: the tasks of each type of job (`quantizing`, `training`, `training_text`), one process each,
  and `task_process`: the parent's view of it
- `job_master`: runs jobs one after the other; a standby continues where a lost master was
- `door`: the routes that it all brings to the endpoint, and the front door of a cluster
"""
