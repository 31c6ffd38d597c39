variable "region" {
  type    = string
  default = "eu-central-1"
}

variable "kubernetes_version" {
  type    = string
  default = "1.34"
}

variable "endpoint_cidrs" {
  description = "Who reaches the cluster's API from outside, as [\"203.0.113.7/32\"]; [] for a private endpoint, which only the VPC reaches."
  type        = list(string)
  validation {
    condition     = !contains(var.endpoint_cidrs, "0.0.0.0/0") && !contains(var.endpoint_cidrs, "::/0")
    error_message = "endpoint_cidrs opens the API to everybody: name your addresses, or [] for a private endpoint."
  }
}

variable "instance_types" {
  description = "One GPU: an A10G with 24 GiB, 8 CPUs and 32 GiB of memory. Spot wants several types of the same size."
  type        = list(string)
  default     = ["g5.2xlarge"]
}

variable "capacity_type" {
  description = "ON_DEMAND, or SPOT: two minutes of notice, in which an engine drains; the disk tier stays."
  type        = string
  default     = "ON_DEMAND"
  validation {
    condition     = contains(["ON_DEMAND", "SPOT"], var.capacity_type)
    error_message = "capacity_type is ON_DEMAND or SPOT."
  }
}

variable "gpu_nodes" {
  description = "A node for each replica. Between min and max the Cluster Autoscaler decides, which you install."
  type        = object({ min = number, max = number, desired = number })
  default     = { min = 1, max = 1, desired = 1 }
}

variable "node_disk_gib" {
  type    = number
  default = 100
}

variable "kms_key_arn" {
  description = "A key of yours that encrypts the volumes of models and caches; by default the account's key for EBS."
  type        = string
  default     = null
}

variable "monthly_limit_usd" {
  type    = number
  default = 1500
}

variable "alarm_email" {
  type = string
}
