"""Requests that are no chat: jobs of tasks, which outlive the server that runs them (DeepServe 3).

- `job_states`, `job_records`: what a job and its tasks are, and from which state each may go to which
- `state_file`, `job_store`, `lease`: all of it in one SQLite file, and who may move jobs on
- `member_table`, `cluster_manager`: the servers of a cluster, and who starts those again that are lost
- `task_work`: the tasks of each type of job (`quantizing`, `training`, `training_text`), one process each,
  and `task_process`: how its parent sees it
- `job_master`: takes one job after the other; a standby goes on where a lost one was
"""
