# A node for each replica of ../helm/values-three-replicas.yaml, which scales up to six.
gpu_nodes = { min = 3, max = 6, desired = 3 }
