# No GPU node while no replica runs. With ../helm: autoscaling.kind keda, min 0 and working hours, or
# kubectl scale statefulset engine --replicas 0. The Cluster Autoscaler removes and adds the node.
gpu_nodes = { min = 0, max = 1, desired = 0 }
