"""Expert servers in processes of their own (Expert-as-a-Service): their buffers and how clients reach them,
the monitor that lists them, processes that this one starts, and Ray, which starts them on several computers.
"""
