# A cluster on AWS for the chart of ../helm, and an alarm on what it costs:
#   terraform init && terraform apply -var alarm_email=you@example.org -var 'endpoint_cidrs=["203.0.113.7/32"]'
#   aws eks update-kubeconfig --name ragcache
#   helm install nvidia-device-plugin nvidia-device-plugin --repo https://nvidia.github.io/k8s-device-plugin
#   helm install engine ../helm -f ../helm/values-one-gpu.yaml --set image.repository=your-registry/ragcache
# Variants: -var-file three-replicas.tfvars, spot.tfvars, scale-to-zero.tfvars.
terraform {
  required_version = ">= 1.6"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.95"
    }
    kubernetes = {
      source  = "hashicorp/kubernetes"
      version = "~> 2.30"
    }
    random = {
      source  = "hashicorp/random"
      version = "~> 3.6"
    }
  }
}

provider "aws" {
  region = var.region
}

provider "kubernetes" {
  host                   = module.eks.cluster_endpoint
  cluster_ca_certificate = base64decode(module.eks.cluster_certificate_authority_data)
  exec {
    api_version = "client.authentication.k8s.io/v1beta1"
    command     = "aws"
    args        = ["eks", "get-token", "--cluster-name", module.eks.cluster_name, "--region", var.region]
  }
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
  cluster_version                          = var.kubernetes_version
  vpc_id                                   = module.vpc.vpc_id
  subnet_ids                               = module.vpc.private_subnets
  cluster_endpoint_private_access          = true
  cluster_endpoint_public_access           = length(var.endpoint_cidrs) > 0
  cluster_endpoint_public_access_cidrs     = var.endpoint_cidrs
  enable_cluster_creator_admin_permissions = true
  cluster_addons = {
    coredns            = {}
    kube-proxy         = {}
    vpc-cni            = {}
    aws-ebs-csi-driver = {}
  }

  eks_managed_node_groups = {
    # What the cluster itself runs: GPU nodes are for engines alone, and may scale to zero.
    system = {
      ami_type                     = "AL2023_x86_64_STANDARD"
      instance_types               = ["t3.large"]
      min_size                     = 1
      max_size                     = 2
      desired_size                 = 1
      iam_role_additional_policies = local.volume_policies
    }
    gpu = {
      ami_type       = "AL2023_x86_64_NVIDIA"
      instance_types = var.instance_types
      capacity_type  = var.capacity_type
      # A disk tier's volume lies in one zone, and a node in another zone cannot attach it.
      subnet_ids   = [module.vpc.private_subnets[0]]
      min_size     = var.gpu_nodes.min
      max_size     = var.gpu_nodes.max
      desired_size = var.gpu_nodes.desired
      # The image has 20 GB unpacked, and pulls need as much again.
      block_device_mappings = {
        root = {
          device_name = "/dev/xvda"
          ebs         = { volume_type = "gp3", volume_size = var.node_disk_gib, encrypted = true, delete_on_termination = true }
        }
      }
      taints = {
        gpu = { key = "nvidia.com/gpu", value = "true", effect = "NO_SCHEDULE" }
      }
      iam_role_additional_policies = local.volume_policies
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
