# Spot capacity: AWS takes a node back after two minutes of notice. Drains of 60 s fit, and volumes stay.
capacity_type  = "SPOT"
instance_types = ["g5.2xlarge", "g6.2xlarge"]
