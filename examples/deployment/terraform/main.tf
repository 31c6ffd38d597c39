# A cluster on AWS with one GPU node for the engine of ../kubernetes, and an alarm on what it costs:
#   terraform init && terraform apply
#   aws eks update-kubeconfig --name ragcache
#   helm install nvidia-device-plugin nvidia-device-plugin --repo https://nvidia.github.io/k8s-device-plugin
#   kubectl apply --kustomize ../kubernetes
terraform {
  required_version = ">= 1.6"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.80"
    }
  }
}

variable "region" {
  type    = string
  default = "eu-central-1"
}

variable "instance_type" {
  description = "One GPU: an A10G with 24 GiB. Host memory of documents is RAM of the instance."
  type        = string
  default     = "g5.2xlarge"
}

variable "monthly_limit_usd" {
  type    = number
  default = 1500
}

variable "alarm_email" {
  type = string
}

provider "aws" {
  region = var.region
}

data "aws_availability_zones" "available" {
  state = "available"
}

module "vpc" {
  source  = "terraform-aws-modules/vpc/aws"
  version = "~> 5.0"

  name               = "ragcache"
  cidr               = "10.0.0.0/16"
  azs                = slice(data.aws_availability_zones.available.names, 0, 2)
  private_subnets    = ["10.0.1.0/24", "10.0.2.0/24"]
  public_subnets     = ["10.0.101.0/24", "10.0.102.0/24"]
  enable_nat_gateway = true
  single_nat_gateway = true
}

module "eks" {
  source  = "terraform-aws-modules/eks/aws"
  version = "~> 20.0"

  cluster_name                             = "ragcache"
  cluster_version                          = "1.31"
  vpc_id                                   = module.vpc.vpc_id
  subnet_ids                               = module.vpc.private_subnets
  cluster_endpoint_public_access           = true
  enable_cluster_creator_admin_permissions = true
  cluster_addons = {
    coredns            = {}
    kube-proxy         = {}
    vpc-cni            = {}
    aws-ebs-csi-driver = {}
  }

  eks_managed_node_groups = {
    gpu = {
      ami_type       = "AL2023_x86_64_NVIDIA"
      instance_types = [var.instance_type]
      # A disk tier belongs to one engine, and lies in one zone.
      subnet_ids   = [module.vpc.private_subnets[0]]
      min_size     = 1
      max_size     = 1
      desired_size = 1
      iam_role_additional_policies = {
        ebs = "arn:aws:iam::aws:policy/service-role/AmazonEBSCSIDriverPolicy"
      }
    }
  }
}

resource "aws_budgets_budget" "monthly" {
  name         = "ragcache"
  budget_type  = "COST"
  limit_amount = tostring(var.monthly_limit_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  notification {
    comparison_operator        = "GREATER_THAN"
    threshold                  = 80
    threshold_type             = "PERCENTAGE"
    notification_type          = "FORECASTED"
    subscriber_email_addresses = [var.alarm_email]
  }
}
